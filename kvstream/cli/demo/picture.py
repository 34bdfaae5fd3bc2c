"""The layer pipeline of one stream as a picture: for the terminal, and as an SVG file.

Pure functions from times to text. Both show the same: when the prefill worker computed each layer, and when that layer
was in place on the decode side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape, quoteattr

import msgspec

__all__ = ["Pipeline", "render_svg", "render_text"]


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. Times are in milliseconds from the start of the prefill.

    `ready[l]` is when layer l's KV was computed, `arrived[l]` when its last byte was in place on the decode side.
    """

    model: str
    tokens: int
    bytes: int
    lane: str
    destination: str
    ready: tuple[float, ...]
    arrived: tuple[float, ...]
    prefill_end: float
    first_token: float
    exposed_ms: float
    one_layer_ms: float
    overlap: float

    @property
    def layers(self) -> int:
        return len(self.ready)

    @property
    def end(self) -> float:
        """The last moment of the picture."""
        return max(self.first_token, self.prefill_end, *self.arrived)

    def computing(self, layer: int) -> tuple[float, float]:
        """From when to when the prefill worker computed what this layer's KV took."""
        return (self.ready[layer - 1] if layer else 0.0), self.ready[layer]


# -- terminal

_MODEL_NAMES: Final = {"smollm2": "SmolLM2-135M", "synthetic": "random weights"}
_LANE_NAMES: Final = {"shared": "shared memory", "get": "read by the receiver", "put": "written by the sender"}

_WIDTH: Final = 100
_MAX_ROWS: Final = 40
_LABEL: Final = 12
_LEVELS: Final = " ▁▂▃▄▅▆▇█"

_COMPUTE: Final = "\x1b[34m"
_ARRIVAL: Final = "\x1b[33m"
_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"


def render_text(pipeline: Pipeline, *, width: int = _WIDTH, color: bool = False) -> str:
    """The pipeline in at most `width` columns (at least 60); of a model with many layers only every n-th is shown."""
    if width < 60:
        raise ValueError(f"width: at least 60 columns, not {width}")
    columns = width - _LABEL - 1
    scale = (columns - 1) / pipeline.end

    def paint(style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if color and style else text

    def row(label: str, cells: Sequence[tuple[int, str, str]]) -> str:
        """Cells are (column, character, style), later ones over earlier ones."""
        line: list[tuple[str, str]] = [(" ", "")] * columns
        for column, character, style in cells:
            line[min(max(column, 0), columns - 1)] = (character, style)
        while line and line[-1][0] == " ":
            line.pop()
        runs = groupby(line, key=lambda cell: cell[1])
        text = "".join(paint(style, "".join(character for character, _ in run)) for style, run in runs)
        return f"{label:>{_LABEL}} {text}".rstrip()

    lines = [_title(pipeline), ""]
    step = math.ceil(pipeline.layers / _MAX_ROWS)
    shown = list(range(pipeline.layers - 1, -1, -step))[::-1]
    for layer in shown:
        start, stop = pipeline.computing(layer)
        first, last = int(start * scale), max(int(start * scale), int(stop * scale) - 1)
        cells = [(column, "█", _COMPUTE) for column in range(first, last + 1)]
        mark = max(last + 1, int(pipeline.arrived[layer] * scale))
        cells += [(column, "·", _DIM) for column in range(last + 1, mark)]
        cells.append((mark, "●", _ARRIVAL))
        lines.append(row(f"layer {layer}", cells))
    token = int(pipeline.first_token * scale)
    tail = range(int(pipeline.ready[-1] * scale), int(pipeline.prefill_end * scale))
    lines.append(row("first token", [*((column, "█", _COMPUTE) for column in tail), (token, "◆", _ARRIVAL)]))
    share: list[tuple[int, str, str]] = []
    for column in range(int(pipeline.end * scale) + 1):
        there = sum(1 for at in pipeline.arrived if at * scale < column + 1) / pipeline.layers
        share.append((column, _LEVELS[int(there * (len(_LEVELS) - 1))], _ARRIVAL))
    lines.append(row("KV arrived", share))
    ticks = [(int(at * scale), f"{at:g}") for at in _ticks(pipeline.end, 8)]
    axis: list[tuple[int, str, str]] = []
    for column, text in ticks:
        if column + len(text) <= columns:
            axis += [(column + n, character, _DIM) for n, character in enumerate(text)]
    lines.append(row("ms", axis))
    lines.append("")
    lines.append(
        f"{'':>{_LABEL}} {paint(_COMPUTE, '█')} prefill computes  "
        f"{paint(_ARRIVAL, '●')} layer in place on {pipeline.destination}  "
        f"{paint(_ARRIVAL, '◆')} first token on {pipeline.destination}"
    )
    lines.append(
        f"{'':>{_LABEL}} {pipeline.overlap:.0%} of the KV bytes were there when the last layer was computed; "
        f"{pipeline.exposed_ms:.1f} ms exposed"
    )
    return "\n".join(lines)


def _title(pipeline: Pipeline) -> str:
    model = _MODEL_NAMES.get(pipeline.model, pipeline.model)
    lane = _LANE_NAMES.get(pipeline.lane, pipeline.lane)
    return (
        f"{model}: {pipeline.tokens} tokens, {pipeline.layers} layers, {pipeline.bytes / 1e6:.1f} MB, "
        f"prefill-0 → {pipeline.destination} ({lane})"
    )


def _ticks(end: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers from 0 to `end`."""
    rough = end / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [n * step for n in range(int(end / step) + 1)]


# -- SVG

_W, _H = 960, 660
_LEFT, _RIGHT = 84, 928  # of the plot and of the strip below it
_TOP, _BOTTOM = 116, 446
_STRIP_TOP, _STRIP_BOTTOM = 462, 502

# (class, property, light, dark). Light ones are attributes, so that a renderer without CSS shows them; dark ones are in
# a media query, which wins over attributes.
_PALETTE: Final = {
    "card": ("fill", "#ffffff", "#0f141b"),
    "inset": ("fill", "#f6f8fb", "#171e28"),
    "edge": ("stroke", "#d5dbe3", "#323c49"),
    "grid": ("stroke", "#e9edf2", "#222b36"),
    "title": ("fill", "#17202b", "#f0f4f8"),
    "text": ("fill", "#4a5665", "#aeb9c6"),
    "compute": ("fill", "#3f78d8", "#5b93f0"),
    "tail": ("fill", "#a9c4f0", "#2f4f85"),
    "transfer": ("fill", "#e8832a", "#f59b45"),
    "arrived": ("fill", "#f8dcc0", "#5a3d1f"),
    "rule": ("stroke", "#e8832a", "#f59b45"),
}


def render_svg(pipeline: Pipeline) -> str:
    """An SVG document of 960 by 660, self-contained, readable on light and dark pages."""
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" width="{_W}" height="{_H}" role="img" '
        f'aria-labelledby="title description" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif\">",
        '<title id="title">KV cache streamed layer by layer while prefill computes</title>',
        f'<desc id="description">{escape(_title(pipeline))}</desc>',
        "<style>@media (prefers-color-scheme: dark) {"
        + "".join(f".{name}{{{kind}:{dark}}}" for name, (kind, _, dark) in _PALETTE.items())
        + "}</style>",
        _rect("card", 0.5, 0.5, _W - 1, _H - 1, rx=12, edge=True),
        *_header(pipeline),
        *_plot(pipeline),
        *_inset(pipeline),
        *_figures(pipeline),
        "</svg>",
    ]
    return "\n".join(elements) + "\n"


def _header(pipeline: Pipeline) -> Iterator[str]:
    yield _text("title", 32, 42, "The KV cache arrives while prefill still computes", size=21, weight=600)
    yield _text("text", 32, 66, _title(pipeline), size=13.5)
    x = 32.0
    for name, label in (
        ("compute", "prefill-0 computes a layer"),
        ("transfer", f"its KV moves to {pipeline.destination}"),
        ("tail", "prefill-0 computes the first token"),
    ):
        yield _rect(name, x, 82, 12, 12, rx=2)
        yield _text("text", x + 18, 92.5, label, size=12.5)
        x += 18 + 7.1 * len(label) + 22


def _plot(pipeline: Pipeline) -> Iterator[str]:
    def x(at: float) -> float:
        return _LEFT + at / pipeline.end * (_RIGHT - _LEFT)

    height = (_BOTTOM - _TOP) / (pipeline.layers + 1)
    for at in _ticks(pipeline.end, 8):
        yield _line("grid", x(at), _TOP, x(at), _STRIP_BOTTOM)
        yield _text("text", x(at), _STRIP_BOTTOM + 18, f"{at:g}", size=12, anchor="middle")
    yield _text("text", _LEFT - 10, _STRIP_BOTTOM + 18, "ms", size=12, anchor="end")
    yield from _rows(pipeline, range(pipeline.layers), x, lambda row: _TOP + row * height, height)
    every = max(1, math.ceil(pipeline.layers / 10))
    for layer in range(0, pipeline.layers, every):
        y = _TOP + (layer + 0.5) * height + 4
        yield _text("text", _LEFT - 10, y, f"layer {layer}", size=11.5, anchor="end")

    yield _text("text", _LEFT - 10, _STRIP_TOP + 15, "KV on", size=11.5, anchor="end")
    yield _text("text", _LEFT - 10, _STRIP_TOP + 30, pipeline.destination, size=11.5, anchor="end")
    share = (_STRIP_BOTTOM - _STRIP_TOP) / pipeline.layers
    steps = [f"M{_LEFT} {_STRIP_BOTTOM}"]
    for count, at in enumerate(sorted(pipeline.arrived), start=1):
        steps.append(f"H{x(at):.2f}V{_STRIP_BOTTOM - count * share:.2f}")
    steps.append(f"H{_RIGHT}V{_STRIP_BOTTOM}Z")
    yield f'<path class="arrived" d="{"".join(steps)}" fill="{_PALETTE["arrived"][1]}"/>'
    yield _line("edge", _LEFT, _STRIP_BOTTOM, _RIGHT, _STRIP_BOTTOM)


def _inset(pipeline: Pipeline) -> Iterator[str]:
    """The end of the stream, enlarged, in the upper right of the plot; nothing where the plot is not empty there."""
    left, top, width, height = 556.0, 116.0, 372.0, 144.0
    bars_left, bars_right = left + 66, left + width - 20
    bars_top, bars_bottom = top + 32, top + height - 40
    rows_beside = math.ceil((height + 4) / ((_BOTTOM - _TOP) / (pipeline.layers + 1)))
    busy_until = max(pipeline.arrived[:rows_beside]) / pipeline.end * (_RIGHT - _LEFT) + _LEFT
    if busy_until > left - 8:
        return
    # The part after the last layer takes a sixth of it.
    begin = max(0.0, pipeline.end - 6 * max(pipeline.end - pipeline.ready[-1], pipeline.end / 1000))
    first = next(layer for layer, at in enumerate(pipeline.arrived) if at > begin or layer == pipeline.layers - 1)
    layers = range(max(first, pipeline.layers - 3), pipeline.layers)
    row = min(22.0, (bars_bottom - bars_top) / (len(layers) + 1))
    scale = (bars_right - bars_left) / (pipeline.end - begin)

    def x(at: float) -> float:
        return bars_left + (max(at, begin) - begin) * scale

    yield _rect("inset", left, top, width, height, rx=8, edge=True)
    title = f"The last {pipeline.end - begin:.0f} ms, enlarged"
    yield _text("title", left + 14, top + 22, title, size=12.5, weight=600)
    yield from _rows(pipeline, layers, x, lambda index: bars_top + index * row, row)
    for index, layer in enumerate(layers):
        yield _text("text", bars_left - 8, bars_top + (index + 0.5) * row + 4, f"layer {layer}", size=11, anchor="end")
    bottom = bars_top + (len(layers) + 1) * row
    for line, at, label in (
        (0, pipeline.ready[-1], "last layer computed"),
        (1, pipeline.first_token, f"first token on {pipeline.destination}"),
    ):
        y = bottom + 15 + 14 * line
        yield _line("rule", x(at), bars_top - 4, x(at), y + 1, dash=True)
        yield _text("text", x(at) - 6, y, label, size=11.5, anchor="end")


def _rows(
    pipeline: Pipeline,
    layers: range,
    x: Callable[[float], float],
    y: Callable[[int], float],
    height: float,
) -> Iterator[str]:
    """One row a layer, and one for what follows the last; bars are at least 1.5 wide, so that a fast one is seen."""
    thick = max(1.5, height - min(4.0, height * 0.3))
    gap = (height - thick) / 2
    for index, layer in enumerate(layers):
        start, stop = pipeline.computing(layer)
        yield _bar("compute", x(start), x(stop), y(index) + gap, thick)
        yield _bar("transfer", x(stop), x(pipeline.arrived[layer]), y(index) + gap, thick)
    yield _bar("tail", x(pipeline.ready[-1]), x(pipeline.prefill_end), y(len(layers)) + gap, thick)


def _figures(pipeline: Pipeline) -> Iterator[str]:
    figures = (
        (f"{pipeline.overlap:.1%}", "of the KV bytes had arrived", "when the last layer was computed"),
        (f"{pipeline.exposed_ms:.1f} ms", "of transfer not hidden", "behind computing"),
        (f"{pipeline.one_layer_ms:.1f} ms", "for one layer's transfer", "(median of this stream)"),
        (
            f"{pipeline.first_token:.0f} ms",
            "from the start of prefill",
            f"to the first token on {pipeline.destination}",
        ),
    )
    yield _line("edge", 32, 548, _W - 32, 548)
    for index, (figure, *lines) in enumerate(figures):
        x = 32 + index * (_W - 32) / len(figures)
        yield _text("title", x, 586, figure, size=23, weight=600)
        for n, line in enumerate(lines):
            yield _text("text", x, 610 + 17 * n, line, size=12.5)


def _bar(name: str, start: float, stop: float, y: float, height: float) -> str:
    return _rect(name, start, y, max(stop - start, 1.5), height)


def _rect(name: str, x: float, y: float, width: float, height: float, *, rx: float = 0, edge: bool = False) -> str:
    names = f"{name} edge" if edge else name
    stroke = f' stroke="{_PALETTE["edge"][1]}"' if edge else ""
    corner = f' rx="{rx:g}"' if rx else ""
    return (
        f'<rect class="{names}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{corner} '
        f'fill="{_PALETTE[name][1]}"{stroke}/>'
    )


def _line(name: str, x1: float, y1: float, x2: float, y2: float, *, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="3 3"' if dash else ""
    return (
        f'<line class="{name}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" '
        f'stroke="{_PALETTE[name][1]}"{dashes}/>'
    )


def _text(name: str, x: float, y: float, text: str, *, size: float, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text class="{name}" x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor={quoteattr(anchor)} fill="{_PALETTE[name][1]}">{escape(text)}</text>'
    )

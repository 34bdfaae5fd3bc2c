"""What the demo found: its figures, as plain data and as text. Owns the arithmetic; it measures nothing itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from kvstream.cli.demo.messages import Baselined, Decoded, Prefilled
from kvstream.cli.demo.picture import Pipeline

__all__ = ["DemoReport", "PromptReport", "make_pipeline", "measure", "render_report"]


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. Times are in milliseconds.

    ttft_ms           from the request to the first token in hand on the decode side, with all KV there
    baseline_ttft_ms  from the request to the first token where one process does both
    prefill_ms        computing the prompt, while it was being streamed
    exposed_ms        from the report of the last layer to the last layer's last byte in place on the decode side
    one_layer_ms      a layer's own transfer, from its report to its last byte in place: the median over this stream's
                      layers but the last. All of a prompt's layers have the same number of bytes.
    overlap           share of the KV bytes that belong to layers which were whole on the decode side when the last
                      layer was reported ready; with L layers it can't exceed (L - 1) / L
    bytes             KV bytes that moved
    identical         the answer's tokens are those of the single-process run
    kv_identical      each layer's bytes are the same in both pools
    """

    name: str
    tokens: int
    new_tokens: int
    identical: bool
    kv_identical: bool
    ttft_ms: float
    baseline_ttft_ms: float
    prefill_ms: float
    exposed_ms: float
    one_layer_ms: float
    overlap: float
    bytes: int
    lane: str
    destination: str
    text: str


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, as `--json` prints it. `identical`: tokens and KV bytes of every prompt."""

    model: str
    identical: bool
    prompts: tuple[PromptReport, ...]


def measure(
    name: str,
    prefilled: Prefilled,
    decoded: Decoded,
    baselined: Baselined,
    *,
    asked: float,
    baseline_asked: float,
) -> PromptReport:
    """The figures of one prompt; `asked` and `baseline_asked` are when the coordinator sent the requests."""
    ready, arrived = prefilled.ready, decoded.arrived
    last_ready = ready[-1]
    per_layer = [there - here for here, there in zip(ready[:-1], arrived[:-1], strict=True)]
    in_time = sum(1 for there in arrived if there <= last_ready)
    exposed = max(arrived) - last_ready
    return PromptReport(
        name=name,
        tokens=prefilled.tokens,
        new_tokens=len(decoded.answer),
        identical=decoded.answer == baselined.answer,
        kv_identical=decoded.checksums == prefilled.checksums,
        ttft_ms=_ms(decoded.first_token - asked),
        baseline_ttft_ms=_ms(baselined.first_token - baseline_asked),
        prefill_ms=_ms(prefilled.ended - prefilled.began),
        exposed_ms=_ms(exposed),
        one_layer_ms=_ms(statistics.median(per_layer) if per_layer else exposed),
        overlap=round(in_time / len(arrived), 4),
        bytes=prefilled.bytes,
        lane=prefilled.lane,
        destination=prefilled.destination,
        text=decoded.text,
    )


def make_pipeline(model: str, report: PromptReport, prefilled: Prefilled, decoded: Decoded) -> Pipeline:
    """The same stream as the picture needs it: milliseconds from the start of its prefill."""
    began = prefilled.began
    return Pipeline(
        model=model,
        tokens=report.tokens,
        bytes=report.bytes,
        lane=report.lane,
        destination=report.destination,
        ready=tuple(_ms(at - began) for at in prefilled.ready),
        arrived=tuple(_ms(at - began) for at in decoded.arrived),
        prefill_end=_ms(prefilled.ended - began),
        first_token=_ms(decoded.first_token - began),
        exposed_ms=report.exposed_ms,
        one_layer_ms=report.one_layer_ms,
        overlap=report.overlap,
    )


def render_report(report: DemoReport) -> str:
    """The figures as a table of at most 100 columns, and the answers below it."""
    header = (
        "prompt",
        "tokens",
        "KV MB",
        "to",
        "lane",
        "TTFT",
        "alone",
        "prefill",
        "exposed",
        "1 layer",
        "overlap",
        "same",
    )
    rows = [header] + [
        (
            p.name,
            str(p.tokens),
            f"{p.bytes / 1e6:.1f}",
            p.destination,
            p.lane,
            f"{p.ttft_ms:.0f}",
            f"{p.baseline_ttft_ms:.0f}",
            f"{p.prefill_ms:.0f}",
            f"{p.exposed_ms:.1f}",
            f"{p.one_layer_ms:.1f}",
            f"{p.overlap:.0%}",
            "yes" if p.identical and p.kv_identical else "NO",
        )
        for p in report.prompts
    ]
    lines = _table(rows, left={0, 3, 4})
    lines += [
        "",
        "times in ms.  TTFT: request to first token on the decode side.  alone: the same in a single process.",
        "exposed: last layer computed to its last byte in place.  1 layer: transfer of one, median of the stream.",
        "overlap: share of the KV bytes that were there when the last layer was computed.",
        "same: tokens equal to those of the single process, and KV bytes equal in both pools.",
        "",
    ]
    for p in report.prompts:
        # Random weights answer with control characters, too: they must not reach a terminal.
        text = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in " ".join(p.text.split()))
        lines.append(f"{p.name}: {text or '(nothing to print)'}")
        if not p.identical:
            lines.append("  NOT the tokens of the single-process run")
        if not p.kv_identical:
            lines.append("  NOT the KV bytes of the prefill worker")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], *, left: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

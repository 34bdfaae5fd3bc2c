"""Figures of the benchmarks as SVG: panels of grouped bars with their values, readable on light and dark pages.

A small writer on purpose: it knows bars on a linear or logarithmic scale, and nothing of what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Figure", "Panel", "render", "size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars in groups: one bar per series in each group. `series` is (name, one value per group); a missing value is
    None, and a series of nothing else takes no room. `colors`: of each series, 0 and 5 kvstream, 1, 2 and 6 who it is
    compared with, 3 and 4 limits of the machine; where nobody is compared they only tell series apart. `log`: bars
    start at the power of ten below the least value."""

    title: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    colors: tuple[int, ...] = (0, 1, 2, 3)
    log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels one below the other, under one title."""

    title: str
    subtitle: str
    panels: tuple[Panel, ...]


_WIDTH = 960
_LEFT, _RIGHT = 64, 928
_HEAD = 78
_PLOT = 216
_PANEL = 316

# (class, property, light, dark). Light ones are attributes, so that a renderer without CSS shows them; dark ones are in
# a media query, which wins over attributes.
_PALETTE = {
    "card": ("fill", "#ffffff", "#0f141b"),
    "edge": ("stroke", "#d5dbe3", "#323c49"),
    "grid": ("stroke", "#e9edf2", "#222b36"),
    "title": ("fill", "#17202b", "#f0f4f8"),
    "text": ("fill", "#4a5665", "#aeb9c6"),
    "bar0": ("fill", "#e8832a", "#f59b45"),
    "bar1": ("fill", "#3f78d8", "#5b93f0"),
    "bar2": ("fill", "#8fb2ee", "#3a64ad"),
    "bar3": ("fill", "#a9b4c2", "#5d6a7a"),
    "bar4": ("fill", "#d3dae3", "#3d4856"),
    "bar5": ("fill", "#f3bd8b", "#8f5a26"),
    "bar6": ("fill", "#6aa588", "#4f8a6d"),
}


def render(figure: Figure) -> str:
    """A self-contained SVG document, 960 wide."""
    height = _HEAD + _PANEL * len(figure.panels) + 8
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif\">",
        f'<title id="title">{escape(figure.title)}</title>',
        f'<desc id="description">{escape(figure.subtitle)}</desc>',
        "<style>@media (prefers-color-scheme: dark) {"
        + "".join(f".{name}{{{kind}:{dark}}}" for name, (kind, _, dark) in _PALETTE.items())
        + "}</style>",
        f'<rect class="card edge" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="12" '
        f'fill="{_PALETTE["card"][1]}" stroke="{_PALETTE["edge"][1]}"/>',
        _text("title", 32, 40, figure.title, size=20, weight=600),
        _text("text", 32, 62, figure.subtitle, size=11),
    ]
    for index, panel in enumerate(figure.panels):
        elements.extend(_panel(panel, _HEAD + index * _PANEL))
    elements.append("</svg>")
    return "\n".join(elements) + "\n"


def _panel(panel: Panel, top: float) -> Iterator[str]:
    shown = [
        (color, name, values)
        for color, (name, values) in zip(panel.colors, panel.series, strict=False)
        if any(value is not None for value in values)
    ]
    yield _text("title", 32, top + 18, panel.title, size=14, weight=600)
    x = 32.0
    for color, name, _ in shown:
        yield _rect(f"bar{color}", x, top + 28, 11, 11, rx=2)
        yield _text("text", x + 16, top + 38, name, size=12)
        x += 16 + 6.7 * len(name) + 22
    upper, lower = top + 64, top + 64 + _PLOT
    scale = _Scale(panel, upper, lower)
    for at in scale.ticks:
        y = scale.y(at)
        yield _line("edge" if y == lower else "grid", _LEFT, y, _RIGHT, y)
        yield _text("text", _LEFT - 8, y + 4, f"{at:g}", size=11, anchor="end")
    step = (_RIGHT - _LEFT) / len(panel.groups)
    thick = min(46.0, step * 0.84 / max(1, len(shown)))
    font = 11 if thick >= 30 else 9 if thick >= 18 else 0
    for index, group in enumerate(panel.groups):
        middle = _LEFT + (index + 0.5) * step
        yield _text("text", middle, lower + 18, group, size=11.5, anchor="middle")
        for number, (color, _, values) in enumerate(shown):
            value = values[index]
            if value is None:
                continue
            left = middle + (number - len(shown) / 2) * thick
            y = min(scale.y(value), lower - 1)
            yield _rect(f"bar{color}", left + 1, y, thick - 2, lower - y)
            if font:
                yield _text("text", left + thick / 2, y - 4, _short(value), size=font, anchor="middle")


def size(nbytes: int) -> str:
    """KiB or MiB, whole."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


class _Scale:
    """Where a value of a panel is drawn, and the lines that say so."""

    def __init__(self, panel: Panel, upper: float, lower: float) -> None:
        values = [value for _, series in panel.series for value in series if value is not None and value > 0] or [1.0]
        self._upper, self._lower, self._log = upper, lower, panel.log
        if panel.log:
            self._low, self._high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
            self._high = max(self._high, self._low + 1)
            self.ticks = [10.0**power for power in range(self._low, self._high + 1)]
        else:
            rough = max(values) / 5
            power = 10 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
            self._low, self._high = 0, step * math.ceil(max(values) / step)
            self.ticks = [n * step for n in range(round(self._high / step) + 1)]

    def y(self, value: float) -> float:
        at = math.log10(max(value, 10.0**self._low)) if self._log else max(value, 0)
        return self._lower - (at - self._low) / (self._high - self._low) * (self._lower - self._upper)


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _rect(name: str, x: float, y: float, width: float, height: float, *, rx: float = 0) -> str:
    corner = f' rx="{rx:g}"' if rx else ""
    return (
        f'<rect class="{name}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{corner} '
        f'fill="{_PALETTE[name][1]}"/>'
    )


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line class="{name}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{_PALETTE[name][1]}"/>'
    )


def _text(name: str, x: float, y: float, text: str, *, size: float, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text class="{name}" x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor={quoteattr(anchor)} fill="{_PALETTE[name][1]}">{escape(text)}</text>'
    )

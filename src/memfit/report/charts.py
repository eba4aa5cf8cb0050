"""A chart as HTML: shapes in an SVG that stretches to the page, and text of fixed size over it, with its axes.

It needs no script: `page.js` adds tooltips and zooming. Colours are written "var(--name)" and defined in the style
sheet, one set for light and one for dark. Positions are in units of `GRID`, from the lower left corner.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memfit.foundations import format_bytes
from memfit.report.summary import clean, share_text

GRID = 10_000
"""Height and width of every chart, in the units of its shapes."""
MAX_POINTS = 1500
HEADROOM = 1.16
"""Ratio of a memory axis's height to the highest value on it."""
FAR_BUDGET = 2.5
"""A budget this many times above every peak is named but not drawn, as it would flatten the chart."""
_TICKS = 5
_BYTE_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_SECOND_UNITS = (("min", 120.0, 60.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3), ("µs", 0.0, 1e-6))


@dataclass(frozen=True)
class Axis:
    """A linear axis.

    Args:
        low: Value at the left, or at the bottom.
        high: Value at the other end (> `low`).
        title: Its title, with the unit.
        size: That unit, in units of the values.
    """

    low: float
    high: float
    title: str
    size: float = 1.0

    def at(self, value: float) -> float:
        """Return the position of a value, in units of `GRID` from the low end."""
        return GRID * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the positions of ticks, in units of `GRID`, and their labels."""
        low, high = self.low / self.size, self.high / self.size
        least = (high - low) / _TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))
        digits = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [(self.at(n * step * self.size), f"{n * step:,.{digits}f}") for n in range(first, last + 1)]


def label(text: str, width: int = 64) -> str:
    """Return a record's text on one line, with its middle cut out beyond a width."""
    text = clean(text)
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-width // 2 :]}"


def css_name(category: str) -> str:
    """Return the name of a category's colour in the style sheet."""
    return "--c-" + re.sub("[^a-z0-9]+", "-", category.lower())


def byte_axis(high_bytes: float, title: str, largest_bytes: float | None = None) -> Axis:
    """Return an axis of bytes from 0, in the unit for its largest value."""
    most = high_bytes if largest_bytes is None else largest_bytes
    unit, size = next((name, size) for name, size in _BYTE_UNITS if most >= size or size == 1)
    return Axis(0.0, max(1.0, high_bytes), f"{title} ({unit})", size)


def second_axis(high_seconds: float, title: str) -> Axis:
    """Return an axis of seconds from 0."""
    unit, size = next((name, size) for name, least, size in _SECOND_UNITS if high_seconds >= least)
    return Axis(0.0, max(1e-9, high_seconds), f"{title} ({unit})", size)


def bucket_maxima(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most `limit` indices: the first maximum of each bucket of neighbours."""
    size = max(1, math.ceil(len(values) / limit))
    starts = range(0, len(values), size)
    return [max(range(start, min(start + size, len(values))), key=values.__getitem__) for start in starts]


def bucket_extremes(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most `limit` indices: the maximum and minimum of each bucket of neighbours."""
    if len(values) <= limit:
        return list(range(len(values)))
    lowest = bucket_maxima([-value for value in values], limit // 2)
    return sorted({*bucket_maxima(values, limit // 2), *lowest})


def draws_budget(budget_bytes: int, peak_bytes: int) -> bool:
    """Return whether a budget is near enough to the peak to be drawn on its axis."""
    return budget_bytes <= FAR_BUDGET * peak_bytes


_SYMBOLS = {
    "circle": '<circle cx="8" cy="8" r="4.6"/>',
    "square": '<path d="M3.5 3.5h9v9h-9z"/>',
    "diamond": '<path d="M8 2.4 13.6 8 8 13.6 2.4 8z"/>',
    "hexagon": '<path d="M8 2.6l4.7 2.7v5.4L8 13.4 3.3 10.7V5.3z"/>',
    "triangle": '<path d="M8 2.6 13.6 12.4H2.4z"/>',
    "star": '<path d="M8 .6l2.2 4.9 5.3.5-4 3.6 1.2 5.2L8 12.1l-4.7 2.7 1.2-5.2-4-3.6 5.3-.5z"/>',
}


@dataclass(frozen=True)
class Shape:
    """A filled area or a line, with `points` as corners."""

    points: Sequence[tuple[float, float]]
    colour: str
    name: str = ""
    filled: bool = False
    dashed: bool = False
    width: float = 1.5


@dataclass(frozen=True)
class ChartRule:
    """A horizontal line across the chart, or a vertical one if `upright`, of a kind ("budget", "pass")."""

    kind: str
    at: float
    upright: bool = False


@dataclass(frozen=True)
class Mark:
    """A symbol of fixed size at a point, with its tooltip and label."""

    x: float
    y: float
    symbol: str
    colour: str
    hollow: bool = False
    tip: str = ""
    text: str = ""
    series: str = ""

    @property
    def icon(self) -> str:
        """Return the symbol as an inline SVG."""
        look = f"fill:none;stroke:{self.colour};stroke-width:2" if self.hollow else f"fill:{self.colour}"
        return f'<svg viewBox="0 0 16 16" style="{look}" aria-hidden="true">{_SYMBOLS[self.symbol]}</svg>'


@dataclass(frozen=True)
class Note:
    """Text at a point: `above` or below it, to its left, to its right or centred ("left", "right", "middle")."""

    x: float
    y: float
    text: str
    kind: str = ""
    above: bool = True
    side: str = "middle"


@dataclass(frozen=True)
class Chart:
    """A chart.

    Args:
        shapes: The shapes, from the bottom to the top layer.
        spans: Bars over the chart, from x to x: operators that run again.
        headings: Text over the chart, with its x.
        hover: Data of `page.js` for tooltips; None where marks have them all.
    """

    x: Axis
    y: Axis
    shapes: Sequence[Shape] = ()
    rules: Sequence[ChartRule] = ()
    marks: Sequence[Mark] = ()
    notes: Sequence[Note] = ()
    spans: Sequence[tuple[float, float]] = ()
    headings: Sequence[tuple[float, str]] = ()
    hover: dict[str, Any] | None = field(default=None, repr=False)


def chart_html(chart: Chart, name: str, text: str) -> str:
    """Return a chart as an element with the id `name` ("" for none) and the description `text` for screen readers."""
    x_ticks, y_ticks = chart.x.ticks(), chart.y.ticks()
    grid = "".join(f"M0 {GRID - at:.0f}h{GRID}" for at, _ in y_ticks)
    drawn = [f'<path class="grid" d="{grid}"/>', *map(_shape, chart.shapes), *map(_rule, chart.rules)]
    over = [f'<span class="tx" style="left:{_percent(at)}">{html.escape(tick)}</span>' for at, tick in x_ticks]
    over += [f'<span class="ty" style="bottom:{_percent(at)}">{html.escape(tick)}</span>' for at, tick in y_ticks]
    over += [*map(_note, chart.notes), *map(_mark, chart.marks)]
    spans = "".join(f"M{start:.0f} 0H{end:.0f}" for start, end in chart.spans)
    strip = f'<svg class="strip" viewBox="0 -1 {GRID} 2" preserveAspectRatio="none"><path d="{spans}"/></svg>'
    heads = "".join(f'<span style="left:{_percent(at)}">{html.escape(tick)}</span>' for at, tick in chart.headings)
    identity = f' id="{name}"' if name else ""
    low_x, high_x, low_y, high_y = (
        f"{end / axis.size:.9g}" for axis in (chart.x, chart.y) for end in (axis.low, axis.high)
    )
    return (
        f'<div class="plot"{identity} role="img" aria-label="{html.escape(text)}">'
        f'<div class="yt">{html.escape(chart.y.title)}</div>'
        + (f'<div class="heads">{heads}</div>' if heads else "")
        + (strip if heads or spans else "")
        + f'<div class="box" data-x="{low_x} {high_x}" data-y="{low_y} {high_y}">'
        f'<svg class="shapes" viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none">{"".join(drawn)}</svg>'
        f'{"".join(over)}</div><div class="xt">{html.escape(chart.x.title)}</div></div>'
    )


def key_html(chart: Chart) -> str:
    """Return the legend of a chart's symbols; "" if none has a name."""
    first = {mark.series: mark for mark in reversed(chart.marks) if mark.series}
    items = "".join(f"<li>{first[name].icon}{html.escape(name)}</li>" for name in reversed(first))
    return f'<ul class="key" aria-label="Symbols of the chart">{items}</ul>' if items else ""


def steps_to(points: Iterable[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Return the corners of a step function: each height lasts until the next point, and the last until `end`."""
    corners: list[tuple[float, float]] = []
    for x, y in points:
        if corners and round(corners[-1][1]) == round(y):
            continue
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return [*corners, (end, corners[-1][1])] if corners else []


def _shape(shape: Shape) -> str:
    path = _path(shape.points)
    named = f' data-name="{html.escape(shape.name)}"' if shape.name else ""
    if shape.filled and shape.points:
        first = round(shape.points[0][0])
        return f'<path class="area"{named} style="fill:{shape.colour}" d="M{first} {GRID}L{path[1:]}V{GRID}z"/>'
    look = f"stroke:{shape.colour};stroke-width:{shape.width}" + (";stroke-dasharray:2 4" if shape.dashed else "")
    return f'<path class="line"{named} style="{look}" d="{path}"/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a path in whole units, with relative moves to be short. A NaN interrupts it."""
    parts: list[str] = []
    at: tuple[int, int] | None = None
    for x, y in points:
        if math.isnan(y):
            at = None
            continue
        here = round(x), GRID - round(y)
        if at is None:
            parts.append(f"M{here[0]} {here[1]}h0")
        else:
            right, down = here[0] - at[0], here[1] - at[1]
            parts.append(f"h{right}" if not down else f"v{down}" if not right else f"l{right} {down}")
        at = here
    return "".join(parts)


def _rule(rule: ChartRule) -> str:
    path = f"M{rule.at:.0f} 0v{GRID}" if rule.upright else f"M0 {GRID - rule.at:.0f}h{GRID}"
    return f'<path class="rule {rule.kind}" d="{path}"/>'


def _note(note: Note) -> str:
    look = f"note {note.kind} {note.side} {'above' if note.above else 'below'}"
    return f'<span class="{look}" style="{_place(note)}">{html.escape(note.text)}</span>'


def _mark(mark: Mark) -> str:
    written = f"<b>{html.escape(mark.text)}</b>" if mark.text else ""
    side = " left" if mark.x > 0.55 * GRID else ""
    tip = f' title="{html.escape(mark.tip)}"' if mark.tip else ""
    series = f' data-name="{html.escape(mark.series)}"' if mark.series else ""
    return f'<span class="mark {mark.symbol}{side}" style="{_place(mark)}"{series}{tip}>{mark.icon}{written}</span>'


def _place(shown: Mark | Note) -> str:
    return f"left:{_percent(shown.x)};bottom:{_percent(shown.y)}"


def _percent(at: float) -> str:
    return f"{100 * at / GRID:.2f}%"


class Bar(NamedTuple):
    """A bar; of the kind "plain" it is grey."""

    name: str
    nbytes: int
    kind: str = ""


def bars_html(bars: Sequence[Bar], budget_bytes: int) -> str:
    """Return bars, scaled to include the budget where it is near."""
    largest = max(1, *(bar.nbytes for bar in bars))
    drawn = draws_budget(budget_bytes, largest)
    whole = max(largest, budget_bytes) if drawn else largest
    line = f'<b style="left: {100 * budget_bytes / whole:.2f}%"></b>' if drawn else ""
    rows = "".join(
        f'<div class="row"><span>{html.escape(bar.name)}</span><span class="track {bar.kind}">'
        f'<i style="width: {100 * bar.nbytes / whole:.2f}%"></i>{line}</span>'
        f'<span class="value">{format_bytes(bar.nbytes)}</span></div>'
        for bar in bars
    )
    return f'<div class="bars">{rows}</div>'


def stack_html(by_category: Mapping[str, int]) -> str:
    """Return the bytes by category as one bar with a legend, largest first."""
    held = sorted(((count, name) for name, count in by_category.items() if count > 0), reverse=True)
    total = sum(count for count, _ in held)
    colours = {name: f"background:var({css_name(name)}, var(--ink-2))" for _, name in held}
    parts = "".join(f'<i style="width:{100 * count / total:.2f}%;{colours[name]}"></i>' for count, name in held)
    key = "".join(
        f'<li><span class="swatch" style="{colours[name]}"></span>{html.escape(clean(name))} {format_bytes(count)},'
        f" {share_text(count, total)}</li>"
        for count, name in held
    )
    return f'<div class="stack">{parts}</div><ul class="key">{key}</ul>' if held else ""

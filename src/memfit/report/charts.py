"""The charts of pages and notebooks, each as HTML: shapes in an SVG that stretches to the page, and text over it.

It needs no script: `page.js` adds tooltips and zooming. Colours are written "var(--name)" and defined in the style
sheet, one set for light and one for dark. Positions are in units of `GRID`, from the lower left corner.
"""

from __future__ import annotations

import html
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from memfit.foundations import format_bytes
from memfit.ir import TIMELINE_CATEGORIES, Candidate, Plan, Prediction, Timeline, allows, pareto
from memfit.report.summary import (
    beside_text,
    byte_unit,
    chosen_index,
    clean,
    levers_text,
    region_groups,
    seconds_text,
    share_text,
)

GRID = 10_000
"""Height and width of every chart, in the units of its shapes."""
MAX_POINTS = 1500
HEADROOM = 1.16
"""Ratio of a memory axis's height to the highest value on it."""
FAR_BUDGET = 2.5
"""A budget this many times above every peak is named but not drawn, as it would flatten the chart."""
_TICKS = 5
_WIDE_SPAN = 0.12
_MOST_LINES = 40
_FINE = 50_000
"""Parts that the peak of a timeline is told in: figures of what is under a pointer are whole numbers of them."""
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
    unit, size = byte_unit(most, "TiB")
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


def shown_categories(*timelines: Timeline) -> list[str]:
    """Return the categories of which any timeline ever holds a byte, in the order in which they are stacked."""
    held = {name for timeline in timelines for name, values in timeline.live_bytes.items() if any(values)}
    known = [name for name in TIMELINE_CATEGORIES if name in held]
    return known + sorted(held.difference(known))


def total_bytes(timeline: Timeline) -> list[int]:
    """Return the bytes alive at each point."""
    return [sum(values) for values in zip(*timeline.live_bytes.values(), strict=True)]


def timeline_chart(timeline: Timeline, *, categories: Sequence[str], budget_bytes: int, peak_bytes: int) -> Chart:
    """Return a memory timeline: bytes alive stacked by category, the budget, and the peak.

    Args:
        peak_bytes: The largest peak over the charts that share the axis.
    """
    total = total_bytes(timeline)
    count, points = len(total), bucket_maxima(total)
    drawn = draws_budget(budget_bytes, peak_bytes)
    x = Axis(0.0, max(1.0, count), "operator, in the order of the step")
    y = byte_axis(HEADROOM * max(1, peak_bytes, budget_bytes * drawn), "bytes alive", peak_bytes)
    held = {name: [timeline.live_bytes.get(name, [0] * count)[i] for i in points] for name in categories}
    level, areas = [0] * len(points), []
    for name, live_bytes in held.items():  # each area hides the part of the former one that is not that one's own
        level = [below + live for below, live in zip(level, live_bytes, strict=True)]
        corners = steps_to(((x.at(i), y.at(top)) for i, top in zip(points, level, strict=True)), GRID)
        areas.append(Shape(corners, f"var({css_name(name)}, var(--ink-2))", name=name, filled=True))

    passes = _spans(["backward" if phase == "recompute" else phase for phase in timeline.phases])
    borders = [x.at(start) for _, start, _ in passes if start > count / 100]
    again: list[tuple[int, int]] = []  # where operators run again; near ones made one keep a chart light
    for phase, start, end in _spans(timeline.phases):
        if phase == "recompute" and again and start - again[-1][1] <= count / 300:
            again[-1] = (again[-1][0], end)
        elif phase == "recompute":
            again.append((start, end))

    # What is written by the peak and by the budget stands clear of one another.
    late = timeline.peak_index > count / 2
    near = abs(budget_bytes - timeline.peak_bytes) < (y.high - y.low) / 12
    under = near and timeline.peak_bytes <= budget_bytes
    text = f"budget {format_bytes(budget_bytes)}" + ("" if drawn else " ↑ far above")
    above, side = drawn and (under or not near), "right" if late else "left"
    at_budget = 0 if late else GRID, y.at(budget_bytes) if drawn else GRID
    notes = [Note(*at_budget, text, kind="budget", above=above, side=side)]
    at_peak = x.at(timeline.peak_index), y.at(timeline.peak_bytes)
    if total:
        text, side = f"peak {format_bytes(timeline.peak_bytes)}", "left" if late else "right"
        notes.append(Note(*at_peak, text, kind="peak", above=not under, side=side))

    size = max(1, timeline.peak_bytes // _FINE)
    words: dict[str, int] = {}
    said = [[words.setdefault(label(part, 48), len(words)) for part in timeline.labels[i].split(" · ")] for i in points]
    rules = [ChartRule("pass", at, upright=True) for at in borders] if len(borders) <= _MOST_LINES else []
    return Chart(
        x=x,
        y=y,
        shapes=areas[::-1],
        rules=[*rules, *([ChartRule("budget", y.at(budget_bytes))] if drawn else [])],
        marks=[Mark(*at_peak, "circle", "var(--ink)")] if total else [],
        notes=notes,
        spans=[(x.at(start), x.at(end)) for start, end in again],
        headings=[
            (x.at((start + end) / 2), label(name)) for name, start, end in passes if end - start >= _WIDE_SPAN * count
        ],
        hover={  # what runs at each point and what is alive there: changes from point to point, in `size` bytes
            "kind": "timeline",
            "x": _changes(points),
            "size": size,
            "held": [[name, _changes([round(live / size) for live in of_name])] for name, of_name in held.items()],
            "words": list(words),
            "said": said,
        },
    )


def _changes(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *values])]


def _spans(values: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the runs of equal values, as value, start and end."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [(values[start], start, end) for start, end in pairwise([*starts, len(values)])]


def frontier_chart(plan: Plan) -> Chart:
    """Return the frontier: predicted peak against step time, with the plain step, this plan, and the budget."""
    title, held = "peak allocated", operator.attrgetter("peak_bytes")
    if plan.frontier and all(point.peak_upper_bytes is not None for point in plan.frontier):
        title, held = "peak, at most", operator.attrgetter("peak_upper_bytes")  # which the budget limits
    points: list[Candidate | Prediction] = [*plan.frontier, plan.plain, plan.predicted]
    largest_bytes = max(map(held, points))
    drawn = plan.budget_bytes <= FAR_BUDGET * largest_bytes
    x = byte_axis(1.08 * max(largest_bytes, plan.budget_bytes * drawn), title, largest_bytes)
    y = second_axis(1.12 * max(point.step_seconds for point in points), "step time")

    def mark(point: Candidate | Prediction, series: str, symbol: str, colour: str, text: str = "") -> Mark:
        hollow = colour == "var(--denied)"  # points that need a freer class
        at = x.at(held(point)), y.at(point.step_seconds)
        return Mark(*at, symbol, colour, hollow=hollow, tip=_point_text(plan, point), text=text, series=series)

    within = [point for point in plan.frontier if allows(plan.allowed, point.numerics)]
    own = chosen_index(plan)
    ours = plan.predicted if own is None else plan.frontier[own]
    marks = [mark(point, "allowed", "circle", "var(--accent)") for point in within if point is not ours]
    for numerics, symbol in {"reordered": "hexagon", "reduced": "diamond", "changed": "triangle"}.items():
        members = [c for c in plan.frontier if c.numerics == numerics and not allows(plan.allowed, c.numerics)]
        for i, point in enumerate(members):
            marks.append(mark(point, f'needs numerics="{numerics}"', symbol, "var(--denied)", "" if i else numerics))
    marks.append(mark(plan.plain, "plain step", "square", "var(--ink)"))
    marks.append(mark(ours, "this plan", "star", "var(--chosen)", "this plan"))

    best = pareto(within, held, lambda point: point.step_seconds)
    line = (
        steps_to(((x.at(held(point)), y.at(point.step_seconds)) for point in best), x.at(held(best[-1])))
        if best
        else []
    )
    text = f"budget {format_bytes(plan.budget_bytes)}" + ("" if drawn else " → far beyond")
    at = x.at(plan.budget_bytes) if drawn else GRID
    return Chart(
        x=x,
        y=y,
        shapes=[Shape(line, "var(--accent)", name="frontier", dashed=True)] if line else [],
        rules=[ChartRule("budget", at, upright=True)] if drawn else [],
        marks=marks,
        notes=[Note(at, GRID, text, kind="budget", above=False, side="left" if at > GRID / 2 else "right")],
    )


def _point_text(plan: Plan, point: Candidate | Prediction) -> str:
    speed = beside_text(point.step_seconds, plan.plain.step_seconds, "plain")
    lines = [f"{format_bytes(point.peak_bytes)}, {seconds_text(point.step_seconds)} ({speed})"]
    if isinstance(point, Prediction):
        return "\n".join([*lines, "the plain step" if point is plan.plain else "the plan, predicted"])
    regions = [label(f"{group.name} {group.action}", 40) for group in region_groups(point.levers.regions)]
    lines.append(f"{levers_text(point)}; {point.numerics}, {point.status}")
    more = [f"and {len(regions) - 4} more"] if len(regions) > 4 else []
    return "\n".join([*lines, *regions[:4], *more])


def curve_chart(
    steps: Sequence[float], values: Sequence[float | None], name: str, axis: Callable[[float, str], Axis] | None = None
) -> Chart:
    """Return a training curve.

    Args:
        values: What to draw; gaps where it is None or not finite.
        axis: Gives the axis from 0 up to a value; None for one that holds all values.
    """
    finite = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    known = [value for value in finite if not math.isnan(value)] or [0.0]
    low, high, unit = min(known), max(known), ""
    if axis:
        y = axis(1.08 * high, name)
        unit = clean(y.title.rpartition("(")[2].rstrip(")"))
    else:
        room = 0.06 * (high - low) or max(1e-6, 0.06 * abs(high))
        y = Axis(low - room, high + room, name)
    x = Axis(min(steps), max(max(steps), min(steps) + 1), "step")
    points = bucket_extremes([-math.inf if math.isnan(value) else value for value in finite])
    places = [(x.at(steps[i]), y.at(finite[i])) for i in points]
    is_alone = len(points) == 1 and not math.isnan(places[0][1])
    hover = {
        "kind": "curve",
        "x": _changes([round(steps[i]) for i in points]),
        "y": [None if math.isnan(finite[i]) else float(f"{finite[i] / y.size:.5g}") for i in points],
        "unit": unit,
    }
    line = Shape(places, "var(--accent)", name=name, width=1.6)
    marks = [Mark(*places[0], "circle", "var(--accent)")] if is_alone else []
    return Chart(x=x, y=y, shapes=[line], marks=marks, hover=hover)

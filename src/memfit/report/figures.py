"""The charts of the page and of notebooks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from memfit.foundations import format_bytes
from memfit.ir import TIMELINE_CATEGORIES, Candidate, Plan, Prediction, Timeline, allows
from memfit.report.charts import (
    FAR_BUDGET,
    GRID,
    HEADROOM,
    Axis,
    Chart,
    ChartRule,
    Mark,
    Note,
    Shape,
    bucket_extremes,
    bucket_maxima,
    byte_axis,
    css_name,
    draws_budget,
    label,
    second_axis,
    steps_to,
)
from memfit.report.summary import chosen_index, clean, levers_text, region_groups, seconds_text
from memfit.report.verdict import beside_text

_WIDE_SPAN = 0.12
_MOST_LINES = 40
_Bytes = Callable[[Candidate | Prediction], int]
_FINE = 50_000
"""Parts that the peak of a timeline is told in: figures of what is under a pointer are whole numbers of them."""


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
    points = bucket_maxima(total)
    drawn = draws_budget(budget_bytes, peak_bytes)
    x = Axis(0.0, max(1.0, len(total)), "operator, in the order of the step")
    y = byte_axis(HEADROOM * max(1, peak_bytes, budget_bytes * drawn), "bytes alive", peak_bytes)
    held: dict[str, Sequence[int]] = {name: timeline.live_bytes.get(name, [0] * len(total)) for name in categories}
    return Chart(
        x=x,
        y=y,
        shapes=_stack(held, points, x, y),
        rules=[*_pass_rules(timeline.phases, x), *([ChartRule("budget", y.at(budget_bytes))] if drawn else [])],
        marks=[Mark(x.at(timeline.peak_index), y.at(timeline.peak_bytes), "circle", "var(--ink)")] if total else [],
        notes=_timeline_notes(timeline, budget_bytes, drawn, x, y),
        spans=_recomputed(timeline.phases, x),
        headings=_headings(timeline.phases, x),
        hover=_timeline_hover(timeline, held, points),
    )


def _stack(held: dict[str, Sequence[int]], points: Sequence[int], x: Axis, y: Axis) -> list[Shape]:
    """Return an area for each category, from the highest: each hides the part of the former that is not its own."""
    level = [0] * len(points)
    shapes = []
    for name, live_bytes in held.items():
        level = [below + live_bytes[i] for below, i in zip(level, points, strict=True)]
        corners = steps_to(((x.at(i), y.at(top)) for i, top in zip(points, level, strict=True)), GRID)
        shapes.append(Shape(corners, f"var({css_name(name)}, var(--ink-2))", name=name, filled=True))
    return shapes[::-1]


def _timeline_hover(timeline: Timeline, held: dict[str, Sequence[int]], points: Sequence[int]) -> dict[str, Any]:
    """Return what runs at each point and what is alive there: changes from point to point, in `size` bytes."""
    size = max(1, timeline.peak_bytes // _FINE)
    words: dict[str, int] = {}
    said = [[words.setdefault(label(part, 48), len(words)) for part in timeline.labels[i].split(" · ")] for i in points]
    return {
        "kind": "timeline",
        "x": _changes(points),
        "size": size,
        "held": [[name, _changes([round(live[i] / size) for i in points])] for name, live in held.items()],
        "words": list(words),
        "said": said,
    }


def _changes(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *values])]


def _timeline_notes(timeline: Timeline, budget_bytes: int, drawn: bool, x: Axis, y: Axis) -> list[Note]:
    """Return what is written by the peak and by the budget, clear of one another."""
    late = timeline.peak_index > len(timeline.labels) / 2
    near = abs(budget_bytes - timeline.peak_bytes) < (y.high - y.low) / 12
    under = near and timeline.peak_bytes <= budget_bytes
    text = f"budget {format_bytes(budget_bytes)}" + ("" if drawn else " ↑ far above")
    left, side = (0, "right") if late else (GRID, "left")
    above = drawn and (under or not near)
    notes = [Note(left, y.at(budget_bytes) if drawn else GRID, text, kind="budget", above=above, side=side)]
    if timeline.labels:
        peak = f"peak {format_bytes(timeline.peak_bytes)}"
        at = x.at(timeline.peak_index), y.at(timeline.peak_bytes)
        notes.append(Note(*at, peak, kind="peak", above=not under, side="left" if late else "right"))
    return notes


def _spans(values: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the runs of equal values, as value, start and end."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [(values[start], start, end) for start, end in pairwise([*starts, len(values)])]


def _pass_spans(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the spans of the passes; recomputation is part of the backward pass."""
    return _spans(["backward" if phase == "recompute" else phase for phase in phases])


def _headings(phases: Sequence[str], x: Axis) -> list[tuple[float, str]]:
    wide = [span for span in _pass_spans(phases) if span[2] - span[1] >= _WIDE_SPAN * len(phases)]
    return [(x.at((start + end) / 2), label(name)) for name, start, end in wide]


def _pass_rules(phases: Sequence[str], x: Axis) -> list[ChartRule]:
    """Return a hairline between passes, unless there are too many."""
    spans = [span for span in _pass_spans(phases) if span[1] > len(phases) / 100]
    return [ChartRule("pass", x.at(start), upright=True) for _, start, _ in spans] if len(spans) <= _MOST_LINES else []


def _recomputed(phases: Sequence[str], x: Axis) -> list[tuple[float, float]]:
    """Return where operators run again."""
    spans = [span[1:] for span in _spans(phases) if span[0] == "recompute"]
    return [(x.at(start), x.at(end)) for start, end in _joined(spans, len(phases) / 300)]


def _joined(spans: Sequence[tuple[int, int]], gap: float) -> list[tuple[int, int]]:
    """Return spans with those closer than a gap made one, which keeps a chart of a long step light."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def frontier_chart(plan: Plan) -> Chart:
    """Return the frontier: predicted peak against step time, with the plain step, this plan, and the budget."""
    points: list[Candidate | Prediction] = [*plan.frontier, plan.plain, plan.predicted]
    held, title = _held(plan)
    largest_bytes = max(map(held, points))
    drawn = plan.budget_bytes <= FAR_BUDGET * largest_bytes
    x = byte_axis(1.08 * max(largest_bytes, plan.budget_bytes * drawn), title, largest_bytes)
    y = second_axis(1.12 * max(point.step_seconds for point in points), "step time")
    within = [candidate for candidate in plan.frontier if allows(plan.allowed, candidate.numerics)]
    line = [(x.at(held(point)), y.at(point.step_seconds)) for point in _staircase(within, held)]
    text = f"budget {format_bytes(plan.budget_bytes)}" + ("" if drawn else " → far beyond")
    at = x.at(plan.budget_bytes) if drawn else GRID
    return Chart(
        x=x,
        y=y,
        shapes=[Shape(steps_to(line, line[-1][0]), "var(--accent)", name="frontier", dashed=True)] if line else [],
        rules=[ChartRule("budget", at, upright=True)] if drawn else [],
        marks=_frontier_marks(plan, x, y),
        notes=[Note(at, GRID, text, kind="budget", above=False, side="left" if at > GRID / 2 else "right")],
    )


def _held(plan: Plan) -> tuple[_Bytes, str]:
    """Return a point's bytes that the budget limits, or its peak where a plan's frontier lacks them; and a title."""
    if plan.frontier and all(point.peak_upper_bytes is not None for point in plan.frontier):
        return operator.attrgetter("peak_upper_bytes"), "peak, at most"
    return operator.attrgetter("peak_bytes"), "peak allocated"


def _frontier_marks(plan: Plan, x: Axis, y: Axis) -> list[Mark]:
    """Return the points of the frontier, those that need a freer class hollow, then the plain step and the plan."""
    held, _ = _held(plan)
    chosen = chosen_index(plan)
    others = [c for i, c in enumerate(plan.frontier) if i != chosen and allows(plan.allowed, c.numerics)]
    ours = plan.predicted if chosen is None else plan.frontier[chosen]

    def mark(point: Candidate | Prediction, series: str, symbol: str, colour: str, text: str = "") -> Mark:
        hollow = colour == "var(--denied)"
        at = x.at(held(point)), y.at(point.step_seconds)
        return Mark(*at, symbol, colour, hollow=hollow, tip=_point_text(plan, point), text=text, series=series)

    marks = [mark(point, "allowed", "circle", "var(--accent)") for point in others]
    for name, members, symbol in _denied_groups(plan):
        marks += [
            mark(point, name, symbol, "var(--denied)", "" if i else point.numerics) for i, point in enumerate(members)
        ]
    marks.append(mark(plan.plain, "plain step", "square", "var(--ink)"))
    return [*marks, mark(ours, "this plan", "star", "var(--chosen)", "this plan")]


def _denied_groups(plan: Plan) -> list[tuple[str, list[Candidate], str]]:
    """Return the points that need a freer class than allowed, by class, each with a symbol of its own."""
    groups = []
    for numerics, symbol in {"reordered": "hexagon", "reduced": "diamond", "changed": "triangle"}.items():
        members = [c for c in plan.frontier if c.numerics == numerics and not allows(plan.allowed, c.numerics)]
        if members:
            groups.append((f'needs numerics="{numerics}"', members, symbol))
    return groups


def _staircase(candidates: Sequence[Candidate], held: _Bytes) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and step time, from the leanest."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (held(c), c.step_seconds)):
        if not best or candidate.step_seconds < best[-1].step_seconds:
            best.append(candidate)
    return best


def _point_text(plan: Plan, point: Candidate | Prediction) -> str:
    """Return what a pointer is told about a point."""
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
    y = axis(1.08 * max(known), name) if axis else _loose(min(known), max(known), name)
    x = Axis(min(steps), max(max(steps), min(steps) + 1), "step")
    points = bucket_extremes([-math.inf if math.isnan(value) else value for value in finite])
    places = [(x.at(steps[i]), y.at(finite[i])) for i in points]
    line = [Shape(places, "var(--accent)", name=name, width=1.6)]
    alone = [Mark(*places[0], "circle", "var(--accent)")] if len(points) == 1 and places[0][1] == places[0][1] else []
    unit = clean(y.title.rpartition("(")[2].rstrip(")")) if axis else ""
    hover = {
        "kind": "curve",
        "x": _changes([round(steps[i]) for i in points]),
        "y": [None if math.isnan(finite[i]) else float(f"{finite[i] / y.size:.5g}") for i in points],
        "unit": unit,
    }
    return Chart(x=x, y=y, shapes=line, marks=alone, hover=hover)


def _loose(low: float, high: float, name: str) -> Axis:
    """Return an axis that holds two values with some room around them."""
    room = 0.06 * (high - low) or max(1e-6, 0.06 * abs(high))
    return Axis(low - room, high + room, name)

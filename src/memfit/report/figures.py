"""The charts of the page and of notebooks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise

from memfit.foundations import format_bytes
from memfit.ir import TIMELINE_CATEGORIES, Candidate, Plan, Prediction, Timeline, allows, pareto
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

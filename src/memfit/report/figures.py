"""The charts of the page, as plotly figures in plain dictionaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from memfit.ir.plan import Candidate, Plan, Prediction
from memfit.ir.timeline import TIMELINE_CATEGORIES, Timeline
from memfit.report.axes import (
    FAR_BUDGET,
    HEADROOM,
    Figure,
    annotation,
    base_layout,
    bucket_extremes,
    bucket_maxima,
    byte_unit,
    css_name,
    draws_budget,
    label,
    second_unit,
)
from memfit.report.summary import chosen_index, is_allowed, ratio_text, region_groups, seconds_text
from memfit.units import format_bytes

_WIDE_SPAN = 0.12


def shown_categories(*timelines: Timeline) -> list[str]:
    """Return the categories of which any timeline ever holds a byte, in the order in which they are stacked."""
    held = {name for timeline in timelines for name, values in timeline.live_bytes.items() if any(values)}
    known = [name for name in TIMELINE_CATEGORIES if name in held]
    return known + sorted(held.difference(known))


def total_bytes(timeline: Timeline) -> list[int]:
    """Return the bytes alive at each point."""
    return [sum(values) for values in zip(*timeline.live_bytes.values(), strict=True)]


def timeline_figure(timeline: Timeline, *, categories: Sequence[str], budget_bytes: int, peak_bytes: int) -> Figure:
    """Return a memory timeline: bytes alive stacked by category, the budget, and the peak.

    Args:
        timeline: What to draw.
        categories: What to stack, from the bottom.
        budget_bytes: The budget.
        peak_bytes: The largest peak over the charts that share the axis.
    """
    total = total_bytes(timeline)
    points = bucket_maxima(total)
    top_bytes = max(peak_bytes, budget_bytes) if draws_budget(budget_bytes, peak_bytes) else peak_bytes
    unit, size = byte_unit(max(1, peak_bytes))
    data = [_area(name, timeline.live_bytes.get(name, [0] * len(total)), points, size) for name in categories]
    data.append(_outline(timeline, total, points, unit, size))
    annotations = _phase_labels(timeline.phases)
    shapes = _phase_shapes(timeline.phases)
    if total:
        data.append(_peak_marker(timeline, size))
        near = 0 <= budget_bytes - timeline.peak_bytes < top_bytes / 12
        annotations.append(_peak_label(timeline, budget_bytes if near else timeline.peak_bytes, size))
    shape, text = _budget(budget_bytes, top_bytes, size, left=timeline.peak_index > len(total) / 2)
    return {
        "data": data,
        "layout": base_layout(
            "operator, in the order of the step",
            f"bytes alive ({unit})",
            hovermode="x",
            shapes=[*shapes, *shape],
            annotations=[*annotations, text],
            yaxis={"range": [0, HEADROOM * max(1, top_bytes) / size]},
            xaxis={"range": [0, max(1, len(total) - 1)], "showgrid": False, "tickformat": ",d"},
            margin={"t": 34},
        ),
    }


def _area(name: str, live_bytes: Sequence[int], points: Sequence[int], size: int) -> dict[str, Any]:
    colour = f"var({css_name(name)})"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(name),
        "stackgroup": "live",
        "x": list(points),
        "y": [round(live_bytes[i] / size, 4) for i in points],
        "line": {"width": 0.5, "color": colour, "shape": "hv"},
        "fillcolor": colour,
        "hoverinfo": "skip",
    }


def _outline(timeline: Timeline, total: Sequence[int], points: Sequence[int], unit: str, size: int) -> dict[str, Any]:
    """Return the line over the stack, which carries what the mouse is told."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "total",
        "x": list(points),
        "y": [round(total[i] / size, 4) for i in points],
        "text": [_hover_text(timeline, i) for i in points],
        "line": {"width": 1, "color": "var(--ink)", "shape": "hv"},
        "hovertemplate": f"<b>%{{y:.4~g}} {unit}</b>%{{text}}<extra></extra>",
    }


def _hover_text(timeline: Timeline, index: int) -> str:
    """Return what runs at a point and what is alive there, the largest first, without what is below a hundredth."""
    parts = "".join(f"<br>{label(part, 48)}" for part in timeline.labels[index].split(" · "))
    held = sorted(((values[index], name) for name, values in timeline.live_bytes.items()), reverse=True)
    least = sum(count for count, _ in held) / 100
    rest = "".join(f"<br>{format_bytes(count)}  {label(name)}" for count, name in held if count and count >= least)
    return f"{parts}<br>{rest}"


def _peak_marker(timeline: Timeline, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "peak",
        "x": [timeline.peak_index],
        "y": [timeline.peak_bytes / size],
        "marker": {"size": 9, "color": "var(--surface)", "line": {"width": 2.5, "color": "var(--ink)"}},
        "hoverinfo": "skip",
    }


def _peak_label(timeline: Timeline, at_bytes: int, size: int) -> dict[str, Any]:
    """Return what is written by the peak, at a height at which it stands clear of the budget's line."""
    late = timeline.peak_index > len(timeline.labels) / 2
    return annotation(
        f"<b>peak {format_bytes(timeline.peak_bytes)}</b>",
        x=timeline.peak_index,
        y=at_bytes / size,
        xanchor="right" if late else "left",
        xshift=-9 if late else 9,
        yanchor="bottom",
        font={"size": 13, "color": "var(--ink)"},
        bgcolor="var(--veil)",
    )


def _budget(budget_bytes: int, top_bytes: int, size: int, *, left: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the budget's line and its label; only a label where the budget is far above the chart."""
    drawn = budget_bytes <= top_bytes
    line = {
        "type": "line",
        "name": "budget",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": budget_bytes / size,
        "y1": budget_bytes / size,
        "line": {"color": "var(--budget)", "width": 2, "dash": "dash"},
    }
    text = f"budget {format_bytes(budget_bytes)}" + ("" if drawn else " ↑ far above")
    where = {"y": budget_bytes / size, "yanchor": "bottom"} if drawn else {"yref": "paper", "y": 1, "yanchor": "top"}
    side = {"x": 0, "xanchor": "left"} if left else {"x": 1, "xanchor": "right"}
    font = {"size": 12, "color": "var(--budget)"}
    halo = {**line, "name": "halo", "line": {"color": "var(--veil)", "width": 5}}
    named = annotation(text, xref="paper", **side, **where, font=font, bgcolor="var(--veil)")
    return [halo, line] if drawn else [], named


def _spans(values: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the runs of equal values, as value, start and end."""
    spans: list[tuple[str, int, int]] = []
    for i, value in enumerate(values):
        if spans and spans[-1][0] == value:
            spans[-1] = (value, spans[-1][1], i + 1)
        else:
            spans.append((value, i, i + 1))
    return spans


def _pass_spans(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the spans of the passes; recomputation is part of the backward pass."""
    return _spans(["backward" if phase == "recompute" else phase for phase in phases])


def _phase_labels(phases: Sequence[str]) -> list[dict[str, Any]]:
    wide = [span for span in _pass_spans(phases) if span[2] - span[1] >= _WIDE_SPAN * len(phases)]
    font = {"size": 11, "color": "var(--ink-2)"}
    return [
        annotation(label(name), x=(start + end) / 2, yref="paper", y=1.03, yanchor="bottom", font=font)
        for name, start, end in wide
    ]


def _phase_shapes(phases: Sequence[str]) -> list[dict[str, Any]]:
    """Return a hairline between passes, and a bar over the chart where operators run again."""
    hairline = {"color": "var(--ink-2)", "width": 1, "dash": "dot"}
    spans = [span for span in _pass_spans(phases) if span[1] > len(phases) / 100]
    lines = spans if len(spans) <= 40 else []
    shapes: list[dict[str, Any]] = [
        {"type": "line", "name": "pass", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": hairline}
        for _, x, _ in lines
    ]
    for start, end in _joined([span[1:] for span in _spans(phases) if span[0] == "recompute"], len(phases) / 300):
        box = {"type": "rect", "yref": "paper", "y0": 1.005, "y1": 1.03, "x0": start, "x1": end}
        shapes.append({**box, "name": "recompute", "fillcolor": "var(--recompute)", "line": {"width": 0}})
    return shapes


def _joined(spans: Sequence[tuple[int, int]], gap: float) -> list[tuple[int, int]]:
    """Return spans with those closer than a gap made one, which keeps a chart of a long step light."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def frontier_figure(plan: Plan) -> Figure:
    """Return the frontier: predicted peak against step time, with the plain step, this plan, and the budget."""
    points: list[Candidate | Prediction] = [*plan.frontier, plan.plain, plan.predicted]
    largest_bytes = max(point.peak_bytes for point in points)
    unit, size = byte_unit(largest_bytes)
    time_unit, time_size = second_unit(max(point.step_seconds for point in points))
    shapes, text = _budget(plan.budget_bytes, int(FAR_BUDGET * largest_bytes), size, left=False)
    for shape in shapes:
        shape |= {
            "layer": "below",
            "xref": "x",
            "yref": "paper",
            "x0": shape["y0"],
            "x1": shape["y1"],
            "y0": 0,
            "y1": 1,
        }
    side = {"x": plan.budget_bytes / size, "xanchor": "left", "yref": "paper", "y": 1, "yanchor": "bottom"}
    text |= {**side, "xref": "x"} if shapes else {}
    return {
        "data": _frontier_traces(plan, size, time_size),
        "layout": base_layout(
            f"peak allocated ({unit})",
            f"step time ({time_unit})",
            shapes=shapes,
            annotations=[text],
            showlegend=True,
            xaxis={"rangemode": "tozero"},
            yaxis={"rangemode": "tozero"},
            margin={"t": 34},
        ),
    }


def _frontier_traces(plan: Plan, size: float, time_size: float) -> list[dict[str, Any]]:
    chosen = chosen_index(plan)
    within = [candidate for candidate in plan.frontier if is_allowed(candidate, plan.allowed)]
    others = [c for i, c in enumerate(plan.frontier) if i != chosen and is_allowed(c, plan.allowed)]
    ours = plan.predicted if chosen is None else plan.frontier[chosen]

    def scatter(points: Sequence[Candidate | Prediction], name: str, **more: Any) -> dict[str, Any]:
        x = [point.peak_bytes / size for point in points]
        y = [point.step_seconds / time_size for point in points]
        told = [_point_text(plan, point) for point in points]
        hover = {"hovertext": told, "hovertemplate": "%{hovertext}<extra></extra>"}
        return {"type": "scatter", "mode": "markers+text", "name": name, "x": x, "y": y, **hover, **more}

    thin = {"color": "var(--accent)", "width": 1.5, "shape": "hv", "dash": "dot"}
    unseen = {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
    traces = [
        scatter(_staircase(within), "", mode="lines", line=thin, **unseen),
        scatter(others, "allowed", marker=_marker("circle", "var(--accent)", 9)),
    ]
    for name, members, marker in _denied_groups(plan):
        written = {"text": [f" {members[0].numerics}"], "textposition": "middle right"}
        traces.append(scatter(members, name, marker=marker, **written))
    written = {"text": ["<b>this plan</b>"], "textposition": "bottom left"}
    traces.append(scatter([plan.plain], "plain step", marker=_marker("square", "var(--ink)", 10)))
    traces.append(scatter([ours], "this plan", marker=_marker("star", "var(--chosen)", 17), **written))
    return traces


def _denied_groups(plan: Plan) -> list[tuple[str, list[Candidate], dict[str, Any]]]:
    """Return the points that need a freer class than allowed, by class, each with a hollow symbol of its own."""
    symbols = {"reordered": "hexagon-open", "reduced": "diamond-open", "changed": "triangle-up-open"}
    groups = []
    for numerics, symbol in symbols.items():
        members = [c for c in plan.frontier if c.numerics == numerics and not is_allowed(c, plan.allowed)]
        if members:
            groups.append((f'needs numerics="{numerics}"', members, _marker(symbol, "var(--denied)", 10)))
    return groups


def _marker(symbol: str, colour: str, size: int) -> dict[str, Any]:
    edge = colour if symbol.endswith("-open") else "var(--surface)"
    return {"symbol": symbol, "color": colour, "size": size, "line": {"width": 1.5, "color": edge}}


def _staircase(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and step time, from the leanest."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.step_seconds)):
        if not best or candidate.step_seconds < best[-1].step_seconds:
            best.append(candidate)
    return best


def _point_text(plan: Plan, point: Candidate | Prediction) -> str:
    """Return what the mouse is told about a point."""
    ratio = ratio_text(point.step_seconds, plan.plain.step_seconds)
    lines = [f"<b>{format_bytes(point.peak_bytes)}, {seconds_text(point.step_seconds)}</b> ({ratio} of plain)"]
    if isinstance(point, Prediction):
        return "<br>".join([*lines, "the step as it was" if point is plan.plain else "the plan, predicted"])
    levers = point.levers
    regions = [label(group.name, 40) for group in region_groups(levers.regions)]
    lines.append(f"{levers.precision}, microbatch {levers.microbatch_size:,}, {point.numerics}, {point.status}")
    lines.append(f"{len(levers.regions):,} modules recomputed:" if regions else "nothing recomputed")
    more = [f"and {len(regions) - 4} more"] if len(regions) > 4 else []
    return "<br>".join([*lines, *regions[:4], *more])


def curve_figure(
    steps: Sequence[float], values: Sequence[float | None], name: str, unit: Callable[[float], tuple[str, float]] | None
) -> Figure:
    """Return a training curve.

    Args:
        steps: The step of each value.
        values: What to draw; gaps where it is None or not finite.
        name: What the axis says.
        unit: Gives the unit of the axis and its size for the largest value; None where there is none.
    """
    finite = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    largest = max((value for value in finite if not math.isnan(value)), default=1.0)
    unit_name, size = unit(largest) if unit else ("", 1.0)
    points = bucket_extremes([-math.inf if math.isnan(value) else value for value in finite])
    axis = f"{name} ({unit_name})" if unit_name else name
    line = {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": name,
        "x": [steps[i] for i in points],
        "y": [None if math.isnan(finite[i]) else float(f"{finite[i] / size:.7g}") for i in points],
        "line": {"color": "var(--accent)", "width": 1.6},
        "hovertemplate": f"step %{{x:,d}}<br><b>%{{y:.5~g}} {unit_name}</b><extra></extra>",
    }
    zero = {"yaxis": {"rangemode": "tozero"}} if unit else {}
    return {"data": [line], "layout": base_layout("step", axis, xaxis={"tickformat": ",d"}, **zero)}

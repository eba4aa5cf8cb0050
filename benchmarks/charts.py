"""Charts as small SVG files, for the docs: lines on logarithmic axes, and stacked areas over time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Readable on white and on dark pages alike: the chart brings its own background, and another one to dark screens.
INK, MUTED, GRID, GROUND = "#1f2328", "#59636e", "#e4e7eb", "#ffffff"
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")
SHADES = ("#94a3b8", "#475569", "#a16207", "#15803d", "#1d4ed8", "#c2410c", "#7e22ce")
DARK = {
    **dict(zip((INK, MUTED, GRID, GROUND), ("#e6edf3", "#9198a1", "#30363d", "#0d1117"), strict=True)),
    **dict(zip(COLOURS, ("#fb923c", "#60a5fa", "#4ade80", "#c084fc"), strict=True)),
}
"""What stands in for each colour where the reader's screen is dark."""
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"

PANEL_WIDTH, PANEL_HEIGHT = 280, 250
LEFT, TOP, BOTTOM, BETWEEN, RIGHT = 62, 74, 56, 192, 150

_DASH = ' stroke-dasharray="6 5"'
_LIMIT = 3.0  # of the axis of intervals, in margins


@dataclass(frozen=True)
class Line:
    """A line of a chart; its label stands at its last point.

    Attributes:
        points: (x, y), both above 0, by rising x.
        shift: Pixels by which the label is moved down, where two would meet.
        dashed: For a line that runs on top of another.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    shift: float = 0.0
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        limit: A height to mark, and its label.
    """

    title: str
    lines: Sequence[Line]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis.

    Attributes:
        ticks: From the lowest to the highest value that is shown.
        text: Writes a tick.
    """

    title: str
    ticks: Sequence[float]
    text: Callable[[float], str]

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        return math.log(value / self.ticks[0]) / math.log(self.ticks[-1] / self.ticks[0])


def chart(title: str, subtitle: str, panels: Sequence[Panel], x: Axis, y: Axis, *, legend: Sequence[Line] = ()) -> str:
    """Return an SVG of panels side by side, on the same axes.

    Args:
        legend: Lines to name at the right of all panels, in the place of a name at each line's end.
    """
    between = LEFT if legend else BETWEEN
    width = LEFT + len(panels) * PANEL_WIDTH + (len(panels) - 1) * between + RIGHT
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = _opening(title, subtitle, width, height)
    for index, panel in enumerate(panels):
        left = LEFT + index * (PANEL_WIDTH + between)
        parts += _panel(panel, left, x, y, y_title=index == 0, named=not legend)
    parts += _key([(line.label, line.colour) for line in legend], width - RIGHT + 14)
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Stack:
    """Areas on top of one another, over time.

    Attributes:
        areas: For each area, from the lowest up, its heights at each moment.
        ends: When each moment ends; the first begins at 0.
        marks: Moments to mark from the ground up, each with a label.
    """

    title: str
    areas: Mapping[str, Sequence[float]]
    ends: Sequence[float]
    marks: Sequence[tuple[float, str]] = ()


def stacks(
    title: str, subtitle: str, panels: Sequence[Stack], ticks: Sequence[float], limit: tuple[float, str], x_title: str
) -> str:
    """Return an SVG of stacked areas side by side, on the same linear axes.

    Args:
        ticks: Heights to write, from 0 to the highest that is shown.
        limit: A height to mark, and its label.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.areas))
    colours = dict(zip(names, SHADES, strict=False))
    width = LEFT + len(panels) * PANEL_WIDTH + (len(panels) - 1) * LEFT + RIGHT
    height, end = TOP + PANEL_HEIGHT + BOTTOM, max(panel.ends[-1] for panel in panels)
    parts = [*_opening(title, subtitle, width, height)]
    for index, panel in enumerate(panels):
        parts += _stack(panel, LEFT + index * (PANEL_WIDTH + LEFT), colours, ticks, limit, end, x_title)
    parts += _key([(name, colours[name]) for name in reversed(names)], width - RIGHT + 14)
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Interval:
    """A mean with an interval around it.

    Attributes:
        half_width: Of the interval (>= 0).
    """

    mean: float
    half_width: float
    colour: str


def intervals(
    title: str,
    subtitle: str,
    rows: Sequence[str],
    columns: Mapping[str, Sequence[Interval]],
    key: Sequence[tuple[str, str]],
    x_title: str,
) -> str:
    """Return an SVG of intervals in units of a margin: rows of one name, a column of them for each subject.

    Args:
        columns: For each subject, the interval of each row. What is beyond the axis ends in an arrow.
        key: Names of the colours.
    """
    left, width, gap, high = 210, 118, 18, 24
    across, bottom = left + len(columns) * (width + gap), TOP + high * len(rows)
    parts = _opening(title, subtitle, across + RIGHT, bottom + BOTTOM)
    for index, name in enumerate(rows):
        parts.append(_text(left - 14, TOP + high * index + 16, name, anchor="end"))
    for index, (subject, found) in enumerate(columns.items()):
        middle = left + index * (width + gap) + width / 2
        unit = width / (2 * _LIMIT)
        parts.append(_text(middle, TOP - 10, subject, anchor="middle", weight=600, size=11))
        for tick in (-_LIMIT, -1.0, 0.0, 1.0, _LIMIT):
            at = middle + tick * unit
            parts.append(_rule(at, TOP, at, bottom, INK if abs(tick) == 1 else GRID, dashed=abs(tick) == 1))
            parts.append(_text(at, bottom + 16, f"{tick:+g}" if tick else "0", colour=MUTED, anchor="middle", size=10))
        for place, interval in enumerate(found):
            parts += _interval(interval, middle, unit, TOP + high * place + 12)
    parts.append(_text(left + (across - left - gap) / 2, bottom + 40, x_title, colour=MUTED, anchor="middle"))
    return "\n".join([*parts, *_key(key, across), "</svg>"]) + "\n"


def _interval(interval: Interval, middle: float, unit: float, y: float) -> list[str]:
    """Return a mean as a dot, or as an arrow at the end of the axis, and the interval around it."""
    low, high = (max(-_LIMIT, min(_LIMIT, interval.mean + way * interval.half_width)) for way in (-1, 1))
    colour, x = interval.colour, middle + max(-_LIMIT, min(_LIMIT, interval.mean)) * unit
    line = (
        f'<line x1="{middle + low * unit:.1f}" y1="{y}" x2="{middle + high * unit:.1f}" y2="{y}" stroke="{colour}"'
        ' stroke-width="2"/>'
    )
    if abs(interval.mean) <= _LIMIT:
        return [line, f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}"/>']
    back = -7 if interval.mean > 0 else 7
    return [line, f'<path d="M{x:.1f} {y} l{back} -5 v10 z" fill="{colour}"/>']


def _stack(
    panel: Stack,
    left: float,
    colours: dict[str, str],
    ticks: Sequence[float],
    limit: tuple[float, str],
    end: float,
    x_title: str,
) -> list[str]:
    bottom, scale = TOP + PANEL_HEIGHT, PANEL_HEIGHT / ticks[-1]
    parts = [_text(left, TOP - 10, panel.title, weight=600)]
    for tick in ticks:
        parts.append(_rule(left, bottom - tick * scale, left + PANEL_WIDTH, bottom - tick * scale, GRID))
        parts.append(_text(left - 8, bottom - tick * scale + 4, f"{tick:g}", colour=MUTED, anchor="end", size=11))
    across = [left + when / end * PANEL_WIDTH for when in (0.0, *panel.ends)]
    below = [0.0] * len(panel.ends)
    for name, heights in panel.areas.items():
        above = [a + b for a, b in zip(below, heights, strict=True)]
        outline = [*_steps(across, above), *reversed(_steps(across, below))]
        points = " ".join(f"{x:.1f},{bottom - y * scale:.1f}" for x, y in outline)
        parts.append(f'<polygon points="{points}" fill="{colours[name]}"/>')
        below = above
    for when, label in panel.marks:
        x = left + when / end * PANEL_WIDTH
        parts += [_rule(x, TOP, x, bottom, MUTED, dashed=True), _text(x + 4, TOP + 10, label, colour=MUTED, size=11)]
    parts.append(
        _rule(left, bottom - limit[0] * scale, left + PANEL_WIDTH, bottom - limit[0] * scale, INK, dashed=True)
    )
    parts.append(_text(left + PANEL_WIDTH, bottom - limit[0] * scale - 5, limit[1], anchor="end", size=11))
    parts.append(_rule(left, bottom, left + PANEL_WIDTH, bottom, MUTED))
    return [*parts, _text(left + PANEL_WIDTH / 2, bottom + 22, x_title, colour=MUTED, anchor="middle")]


def _steps(across: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps each height from its moment's beginning to its end."""
    corners: list[tuple[float, float]] = []
    for index, height in enumerate(heights):
        if corners and corners[-1][1] == height:
            corners[-1] = (across[index + 1], height)
        else:
            corners += [(across[index], height), (across[index + 1], height)]
    return corners


def _opening(title: str, subtitle: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="{FONT}" font-size="12" role="img" aria-label="{_escape(title)}">',
        f"<style>@media (prefers-color-scheme:dark){{{_dark_rules()}}}</style>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{GROUND}"/>',
        _text(16, 24, title, size=15, weight=600),
        _text(16, 42, subtitle, colour=MUTED),
    ]


def _dark_rules() -> str:
    return "".join(f'[fill="{a}"]{{fill:{b}}}[stroke="{a}"]{{stroke:{b}}}' for a, b in DARK.items())


def _panel(panel: Panel, left: float, x: Axis, y: Axis, *, y_title: bool, named: bool) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    parts = [_text(left, TOP - 10, panel.title, weight=600)]
    for tick in y.ticks:
        height = bottom - y.place(tick) * PANEL_HEIGHT
        parts.append(_rule(left, height, left + PANEL_WIDTH, height, GRID))
        parts.append(_text(left - 8, height + 4, y.text(tick), colour=MUTED, anchor="end", size=11))
    for tick in x.ticks:
        across = left + x.place(tick) * PANEL_WIDTH
        parts.append(_rule(across, bottom, across, bottom + 4, MUTED))
        parts.append(_text(across, bottom + 18, x.text(tick), colour=MUTED, anchor="middle", size=11))
    parts.append(_rule(left, bottom, left + PANEL_WIDTH, bottom, MUTED))
    parts.append(_text(left + PANEL_WIDTH / 2, bottom + 40, x.title, colour=MUTED, anchor="middle"))
    if y_title:
        parts.append(_text(16, TOP - 10, y.title, colour=MUTED))
    if panel.limit is not None:
        height = bottom - y.place(panel.limit[0]) * PANEL_HEIGHT
        parts.append(_rule(left, height, left + PANEL_WIDTH, height, INK, dashed=True))
        parts.append(_text(left + 4, height - 5, panel.limit[1], size=11))
    for line in panel.lines:
        parts += _line(line, left, x, y, named)
    return parts


def _key(names: Sequence[tuple[str, str]], left: float) -> list[str]:
    """Return squares of colours with what they stand for, one below the other."""
    parts: list[str] = []
    for index, (name, colour) in enumerate(names):
        place = TOP + 12 + 22 * index
        parts.append(f'<rect x="{left}" y="{place - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 18, place, name))
    return parts


def _line(line: Line, left: float, x: Axis, y: Axis, named: bool) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    places = [(left + x.place(a) * PANEL_WIDTH, bottom - y.place(b) * PANEL_HEIGHT) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{line.colour}"/>' for a, b in places]
    last, dash = places[-1], _DASH if line.dashed else ""
    return [
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>',
        *([] if line.dashed else dots),
        *([_text(last[0] + 9, last[1] + 4 + line.shift, line.label, colour=line.colour, weight=600)] if named else []),
    ]


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dash = _DASH if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'


def _text(
    x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", size: int = 12, weight: int = 400
) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{_escape(text)}</text>'


def _escape(text: str) -> str:
    return html.escape(text)

"""Axes of charts with their ticks and units, and the thinning of long series."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.report.summary import clean

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
        step = nice_step((high - low) / _TICKS)
        digits = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [(self.at(n * step * self.size), f"{n * step:,.{digits}f}") for n in range(first, last + 1)]


def nice_step(step: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that is not below a step (> 0)."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= step * (1 - 1e-9))


def label(text: str, width: int = 64) -> str:
    """Return a record's text on one line, with its middle cut out beyond a width."""
    text = clean(text)
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-width // 2 :]}"


def css_name(category: str) -> str:
    """Return the name of a category's colour in the style sheet."""
    return "--c-" + re.sub("[^a-z0-9]+", "-", category.lower())


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """Return the unit for an axis up to a number of bytes, and its bytes."""
    return next((name, size) for name, size in _BYTE_UNITS if largest_bytes >= size or size == 1)


def second_unit(largest_seconds: float) -> tuple[str, float]:
    """Return the unit for an axis up to a number of seconds, and its seconds."""
    return next((name, size) for name, least, size in _SECOND_UNITS if largest_seconds >= least)


def byte_axis(high_bytes: float, title: str, largest_bytes: float | None = None) -> Axis:
    """Return an axis of bytes from 0, in the unit for its largest value."""
    unit, size = byte_unit(high_bytes if largest_bytes is None else largest_bytes)
    return Axis(0.0, max(1.0, high_bytes), f"{title} ({unit})", size)


def second_axis(high_seconds: float, title: str) -> Axis:
    """Return an axis of seconds from 0."""
    unit, size = second_unit(high_seconds)
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

"""What all charts share: their units, their look, and how a long series is thinned.

Colours are written "var(--name)"; the page replaces them by those of its style sheet, which has one set
for light and one for dark. Text that comes from records goes through `label`, since plotly reads a
subset of HTML in it.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from memfit.report.summary import clean

Figure = dict[str, Any]
MAX_POINTS = 1500
HEADROOM = 1.16
"""Height of a memory axis over the tallest thing on it."""
FAR_BUDGET = 2.5
"""A budget this many times above every peak is named but not drawn, as it would flatten the chart."""
_FONT = "system-ui, sans-serif"
_BYTE_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_SECOND_UNITS = (("min", 120.0, 60.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3), ("µs", 0.0, 1e-6))


def label(text: str, width: int = 64) -> str:
    """Return text from a record so that plotly shows it as it is; its middle is cut out beyond a width."""
    text = clean(text)
    if len(text) > width:
        text = f"{text[: width // 2 - 1]}…{text[-width // 2 :]}"
    return html.escape(text, quote=False)


def css_name(category: str) -> str:
    """Return the name that a category's colour has in the style sheet."""
    return "--c-" + re.sub("[^a-z0-9]+", "-", category.lower())


def byte_unit(largest_bytes: float) -> tuple[str, int]:
    """Return the unit in which an axis up to this many bytes is read, and its bytes."""
    return next((name, size) for name, size in _BYTE_UNITS if largest_bytes >= size or size == 1)


def second_unit(largest_seconds: float) -> tuple[str, float]:
    """Return the unit in which an axis up to this many seconds is read, and its seconds."""
    return next((name, size) for name, least, size in _SECOND_UNITS if largest_seconds >= least)


def bucket_maxima(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most `limit` indices: of each bucket of neighbours, the first that reaches its maximum."""
    size = max(1, math.ceil(len(values) / limit))
    starts = range(0, len(values), size)
    return [max(range(start, min(start + size, len(values))), key=values.__getitem__) for start in starts]


def bucket_extremes(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Return at most `limit` indices: of each bucket of neighbours, those of its maximum and its minimum."""
    if len(values) <= limit:
        return list(range(len(values)))
    lowest = bucket_maxima([-value for value in values], limit // 2)
    return sorted({*bucket_maxima(values, limit // 2), *lowest})


def draws_budget(budget_bytes: int, peak_bytes: int) -> bool:
    """Return whether a budget is near enough to the peak to be drawn on the same axis."""
    return budget_bytes <= FAR_BUDGET * peak_bytes


def annotation(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, **more}


def base_layout(x_title: str, y_title: str, **more: Any) -> dict[str, Any]:
    """Return what all charts share, with what one chart adds."""
    axis = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "fixedrange": False,
        "tickfont": {"size": 11, "color": "var(--ink-2)"},
    }
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _FONT, "size": 12, "color": "var(--ink)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--ink-2)",
            "align": "left",
            "font": {"family": _FONT, "color": "var(--ink)"},
        },
        "modebar": {"bgcolor": "var(--veil)", "color": "var(--ink-2)", "activecolor": "var(--ink)"},
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
        "hovermode": "closest",
    }
    layout |= {key: value for key, value in more.items() if key not in ("xaxis", "yaxis", "margin")}
    font = {"size": 12, "color": "var(--ink-2)"}
    for key, title in (("xaxis", x_title), ("yaxis", y_title)):
        layout[key] = {**axis, "title": {"text": title, "standoff": 10, "font": font}, **more.get(key, {})}
    layout["margin"] = {"l": 56, "r": 12, "t": 14, "b": 48} | more.get("margin", {})
    return layout

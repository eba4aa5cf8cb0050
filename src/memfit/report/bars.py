"""Bars of bytes as HTML, with names and figures, and the budget as a line across them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.report.axes import css_name, draws_budget
from memfit.report.summary import clean, share_text
from memfit.units import format_bytes


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

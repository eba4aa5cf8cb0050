"""Records as HTML for notebooks: the tables of the terminal, and the charts of the page.

They need no script and no other package, so that they show in untrusted and read-only notebooks. Text takes the colours
of the notebook's theme.
"""

from __future__ import annotations

import html
import os
from functools import cache
from pathlib import Path

from rich.console import RenderableType

from memfit.ir.ladder import Ladder
from memfit.ir.plan import Frontier, Plan, Prediction
from memfit.ir.run_record import Comparison
from memfit.ir.verification import Verification
from memfit.report.bars import Bar, bars_html, stack_html
from memfit.report.charts import chart_html, key_html
from memfit.report.estimates import estimate_page
from memfit.report.figures import frontier_chart
from memfit.report.ladders import ladder_chart, ladder_table
from memfit.report.listings import verification_table
from memfit.report.pages import resource
from memfit.report.rendering import html_of
from memfit.report.tables import comparison_table, frontier_table, plan_table, verdict_text
from memfit.report.verdict import plan_verdict

_MOST_INLINE_BYTES = 2_000_000


def framed(*parts: str | RenderableType) -> str:
    """Return parts as one element; strings are HTML, other parts are Rich's tables and text."""
    body = "".join(part if isinstance(part, str) else html_of(part) for part in parts)
    return f'<div class="memfit inline"><style>{_style()}</style>{body}</div>'


@cache
def _style() -> str:
    return resource("charts.css") + resource("notebook.css")


def plan_html(plan: Plan) -> str:
    """Return a plan: its peak beside the plain one's, its tables, and the frontier."""
    plain, planned = plan.plain.peak_bytes, plan.predicted.peak_bytes
    bars = [Bar("plain, predicted", plain, "plain"), Bar("planned, predicted", planned)]
    return framed(plan_table(plan), bars_html(bars, plan.budget_bytes), *_frontier(plan))


def frontier_html(frontier: Frontier) -> str:
    """Return a frontier: its plan's verdict, its chart and table."""
    return framed(verdict_text(plan_verdict(frontier.plan)), *_frontier(frontier.plan))


def _frontier(plan: Plan) -> list[str | RenderableType]:
    chart = frontier_chart(plan)
    picture = chart_html(chart, "", f"{len(plan.frontier)} plans by predicted peak and step time")
    return [picture, key_html(chart), frontier_table(plan)]


def prediction_html(prediction: Prediction) -> str:
    """Return an estimate: the bytes at the peak as a bar, and its tables."""
    return framed(estimate_page(prediction, "Estimate"), stack_html(prediction.by_category))


def verification_html(verification: Verification) -> str:
    """Return a verification: measured and predicted peaks, and failures."""
    plain = verification.plain_measured_peak_bytes
    bars = [] if plain is None else [Bar("plain, measured", plain, "plain")]
    bars += [
        Bar("planned, predicted", verification.predicted_peak_bytes),
        Bar("planned, measured", verification.measured_peak_bytes),
    ]
    return framed(verification_table(verification), bars_html(bars, verification.budget_bytes))


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison of the plain and the planned step."""
    plain, planned = comparison.plain_peak_bytes, comparison.planned_peak_bytes
    bars = [Bar("plain, measured", plain, "plain"), Bar("planned, measured", planned)]
    return framed(comparison_table(None, comparison), bars_html(bars, 0))


def ladder_html(ladder: Ladder) -> str:
    """Return a ladder: its chart and table."""
    chart = ladder_chart(ladder)
    picture = chart_html(chart, "", f"{len(ladder.rungs)} rungs by measured peak and step time")
    return framed(picture, key_html(chart), ladder_table(ladder))


class ReportFile(type(Path())):  # type: ignore[misc]  # Path itself can be subclassed from Python 3.12 on
    """The path of a report; a notebook shows the report itself."""

    def with_segments(self, *segments: str | os.PathLike[str]) -> Path:
        """Return a derived path as a plain `Path`, which is no report."""
        return Path(*segments)

    def _repr_html_(self) -> str | None:
        if not self.is_file() or self.stat().st_size > _MOST_INLINE_BYTES:
            return None
        page = html.escape(self.read_text(encoding="utf-8"))
        where = html.escape(str(self))
        frame = f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="memfit report" class="page"></iframe>'
        return framed(f"<p>{where}</p>{frame}")

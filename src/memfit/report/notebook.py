"""Records as HTML for notebooks: the tables of the terminal, and the charts of the page.

They need no script and no other package, so that they show in untrusted and read-only notebooks. Text takes the colours
of the notebook's theme.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from memfit.foundations import format_bytes
from memfit.ir import (
    Candidate,
    Comparison,
    Device,
    Devices,
    Fleet,
    Frontier,
    Ladder,
    Plan,
    Prediction,
    RangeReport,
    RunRecord,
    Timeline,
    Trace,
    Verification,
    View,
    Views,
    show_with,
)
from memfit.report.charts import Bar, bars_html, chart_html, key_html, stack_html
from memfit.report.estimates import estimate_page
from memfit.report.figures import frontier_chart
from memfit.report.fleets import fleet_line, fleet_table, fleet_text
from memfit.report.ladders import ladder_chart, ladder_table, ladder_text
from memfit.report.listings import device_page, device_table, range_table, run_table, verification_table
from memfit.report.pages import resource
from memfit.report.rendering import html_of, text_of
from memfit.report.summary import clean, levers_text, seconds_text
from memfit.report.tables import comparison_table, frontier_table, plan_table, plan_text, verdict_text
from memfit.report.verdict import beside_text, plan_verdict

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


def show_records() -> None:
    """Have records shown as the terminal and the page show them."""
    show_with(Plan, View(_plan, plan_text, plan_html))
    show_with(Candidate, View(_candidate))
    show_with(Frontier, View(None, lambda found: text_of(frontier_table(found.plan)), frontier_html))
    estimate = _text(lambda prediction: estimate_page(prediction, "Estimate"))
    show_with(Prediction, View(_prediction, estimate, prediction_html))
    show_with(Verification, View(_verification, _text(verification_table), verification_html))
    compared = _text(lambda comparison: comparison_table(None, comparison))
    show_with(Comparison, View(_comparison, compared, comparison_html))
    show_with(Ladder, View(_ladder, ladder_text, ladder_html))
    show_with(Fleet, View(fleet_line, fleet_text, lambda fleet: framed(fleet_table(fleet))))
    show_with(RunRecord, _as_table(_run, run_table))
    show_with(RangeReport, _as_table(_ranges, range_table))
    show_with(Device, _as_table(_device, lambda device: device_page(device, ())))
    show_with(Devices, _as_table(None, lambda devices: device_table(devices, "Devices")))
    show_with(Timeline, View(_timeline))
    show_with(Views, View(lambda views: f"of {len(views.modules):,} modules: {_timeline(views.planned)}"))
    show_with(Trace, View(lambda trace: f"of {len(trace.ops):,} operators"))


def _as_table(line: Callable[[Any], str] | None, table: Callable[[Any], RenderableType]) -> View:
    """Return the view of a record that is the same table in the terminal and in a"""
    return View(line, _text(table), lambda record: framed(table(record)))


def _text(table: Callable[[Any], RenderableType]) -> Callable[[Any], str]:
    return lambda record: text_of(table(record), width=120)


# What `repr` says, in a line


def _plan(plan: Plan) -> str:
    peaks = f"{format_bytes(plan.predicted.peak_bytes)} of {format_bytes(plan.plain.peak_bytes)}"
    speed = beside_text(plan.predicted.step_seconds, plan.plain.step_seconds, "plain")
    return (
        f"for {clean(plan.workload)!r} on {clean(plan.device)}: {peaks}, {speed}, budget"
        f" {format_bytes(plan.budget_bytes)}, {plan.numerics}"
    )


def _candidate(candidate: Candidate) -> str:
    sizes = f"{format_bytes(candidate.peak_bytes)}, {seconds_text(candidate.step_seconds)}"
    return f"{sizes}: {levers_text(candidate)}, {candidate.numerics}"


def _prediction(prediction: Prediction) -> str:
    upper = format_bytes(prediction.peak_upper_bytes)
    return f"{format_bytes(prediction.peak_bytes)}, at most {upper}, {seconds_text(prediction.step_seconds)} a step"


def _verification(found: Verification) -> str:
    state = "verified" if found.holds else f"failed, {len(found.failures)} failure{'s' * (len(found.failures) != 1)}"
    peak, budget = format_bytes(found.measured_peak_bytes), format_bytes(found.budget_bytes)
    return f"{state}: {found.numerics}, {peak} measured of a budget of {budget}"


def _comparison(comparison: Comparison) -> str:
    peaks = f"{format_bytes(comparison.plain_peak_bytes)} → {format_bytes(comparison.planned_peak_bytes)}"
    times = f"{seconds_text(comparison.plain_step_seconds)} → {seconds_text(comparison.planned_step_seconds)}"
    return f"{peaks}, {times} a step, over {len(comparison.planned_losses)} steps"


def _ladder(ladder: Ladder) -> str:
    kept = sum(rung.outcome == "kept" for rung in ladder.rungs)
    return f"for {clean(ladder.workload)!r} on {clean(ladder.device)}: {kept} of {len(ladder.rungs)} rungs kept"


def _run(run: RunRecord) -> str:
    known = run.first_loss is not None and run.last_loss is not None
    losses = f", loss {run.first_loss:.4g} → {run.last_loss:.4g}" if known else ""
    return f"of {clean(run.workload)!r}: {run.status} after {run.steps:,} steps{losses}"


def _ranges(report: RangeReport) -> str:
    return f"of {len(report.modules)} modules: {report.precision}"


def _device(device: Device) -> str:
    return f"{clean(device.name)!r}, {clean(device.description)}: {format_bytes(device.memory_bytes)}"


def _timeline(timeline: Timeline) -> str:
    return f"{len(timeline.labels):,} operators, peak {format_bytes(timeline.peak_bytes)}"

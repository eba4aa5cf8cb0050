"""Tells `ir.display` how each kind of record is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from memfit.ir.device import Device, Devices
from memfit.ir.display import View, show_with
from memfit.ir.fleet import Fleet
from memfit.ir.ladder import Ladder
from memfit.ir.plan import Candidate, Frontier, Plan, Prediction
from memfit.ir.ranges import RangeReport
from memfit.ir.run_record import Comparison, RunRecord, Views
from memfit.ir.timeline import Timeline
from memfit.ir.trace import Trace
from memfit.ir.verification import Verification
from memfit.report import notebook
from memfit.report.estimates import estimate_page
from memfit.report.fleets import fleet_line, fleet_table, fleet_text
from memfit.report.ladders import ladder_text
from memfit.report.listings import device_page, device_table, range_table, run_table, verification_table
from memfit.report.rendering import text_of
from memfit.report.summary import clean, levers_text, seconds_text
from memfit.report.tables import comparison_table, frontier_table, plan_text
from memfit.report.verdict import beside_text
from memfit.units import format_bytes


def show_records() -> None:
    """Have records shown as the terminal and the page show them."""
    show_with(Plan, View(_plan, plan_text, notebook.plan_html))
    show_with(Candidate, View(_candidate))
    show_with(Frontier, View(None, lambda found: text_of(frontier_table(found.plan)), notebook.frontier_html))
    estimate = _text(lambda prediction: estimate_page(prediction, "Estimate"))
    show_with(Prediction, View(_prediction, estimate, notebook.prediction_html))
    show_with(Verification, View(_verification, _text(verification_table), notebook.verification_html))
    compared = _text(lambda comparison: comparison_table(None, comparison))
    show_with(Comparison, View(_comparison, compared, notebook.comparison_html))
    show_with(Ladder, View(_ladder, ladder_text, notebook.ladder_html))
    show_with(Fleet, View(fleet_line, fleet_text, lambda fleet: notebook.framed(fleet_table(fleet))))
    show_with(RunRecord, _as_table(_run, run_table))
    show_with(RangeReport, _as_table(_ranges, range_table))
    show_with(Device, _as_table(_device, lambda device: device_page(device, ())))
    show_with(Devices, _as_table(None, lambda devices: device_table(devices, "Devices")))
    show_with(Timeline, View(_timeline))
    show_with(Views, View(lambda views: f"of {len(views.modules):,} modules: {_timeline(views.planned)}"))
    show_with(Trace, View(lambda trace: f"of {len(trace.ops):,} operators"))


def _as_table(line: Callable[[Any], str] | None, table: Callable[[Any], RenderableType]) -> View:
    """Return the view of a record that is the same table in the terminal and in a notebook."""
    return View(line, _text(table), lambda record: notebook.framed(table(record)))


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

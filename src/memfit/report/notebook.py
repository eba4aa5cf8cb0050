"""Records and progress bars as HTML for notebooks: the tables of the terminal, and the charts of the page.

They need no script and no other package, so that they show in untrusted and read-only notebooks: IPython shows and
replaces bars itself. Text takes the colours of the notebook's theme.
"""

from __future__ import annotations

import functools
import html
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import RenderableType
from rich.text import Text

from memfit import ir
from memfit.foundations import format_bytes, format_seconds, is_called_by_memfit
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
    Views,
)
from memfit.report.charts import Bar, Chart, bars_html, chart_html, frontier_chart, key_html, stack_html
from memfit.report.html import resource
from memfit.report.summary import beside_text, clean, levers_text, plan_verdict, seconds_text
from memfit.report.surveys import answer_lines, fleet_table, ladder_chart, ladder_table
from memfit.report.tables import (
    comparison_table,
    device_page,
    device_table,
    estimate_page,
    frontier_table,
    html_of,
    plan_table,
    range_table,
    run_table,
    text_of,
    verdict_text,
    verification_table,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Line = Callable[[Any], str] | None
_Part = RenderableType | Callable[[], str]
"""A part of a record: Rich's table or text, or what gives the HTML that only a notebook shows."""
_MOST_INLINE_BYTES = 2_000_000
_SECONDS_BETWEEN = 0.1
Defaults = Callable[["Bars", Mapping[str, Any]], dict[str, Callable[..., None]]]
"""Returns the progress arguments for a call with these keyword arguments."""


def _framed(body: str) -> str:
    return f'<div class="memfit inline"><style>{_style()}</style>{body}</div>'


@functools.cache
def _style() -> str:
    return resource("charts.css") + resource("notebook.css")


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
        return _framed(f"<p>{where}</p>{frame}")


def show_records() -> None:
    """Have records shown as the terminal and the page show them."""
    frontier = _view(None, lambda found: [verdict_text(plan_verdict(found.plan)), *_frontier(found.plan)])
    views = {
        Plan: _view(_plan_line, _plan, width=100),
        Candidate: ir.codec.View(_candidate_line),
        Frontier: frontier._replace(text=lambda found: text_of(frontier_table(found.plan))),
        Prediction: _view(_prediction_line, _prediction),
        Verification: _view(_verification_line, _verification),
        Comparison: _view(_comparison_line, _comparison),
        Ladder: _view(_ladder_line, _ladder),
        Fleet: _view(_fleet_line, lambda fleet: [fleet_table(fleet)], width=140),
        RunRecord: _view(_run_line, lambda run: [run_table(run)]),
        RangeReport: _view(_range_line, lambda report: [range_table(report)]),
        Device: _view(_device_line, lambda device: [device_page(device, ())]),
        Devices: _view(None, lambda devices: [device_table(devices, "Devices")]),
        Timeline: ir.codec.View(_timeline_line),
        Views: ir.codec.View(lambda found: f"of {len(found.modules):,} modules: {_timeline_line(found.planned)}"),
        Trace: ir.codec.View(lambda trace: f"of {len(trace.ops):,} operators"),
    }
    for kind, view in views.items():
        ir.codec.show_with(kind, view)


def _view(line: _Line, parts_of: Callable[[Any], list[_Part]], width: int = 120) -> ir.codec.View:
    """Return the view of a record: its line, and its parts as text of a width and as HTML."""

    def text(record: Any) -> str:
        return text_of(*(part for part in parts_of(record) if not callable(part)), width=width)

    def page(record: Any) -> str:
        return _framed("".join(part() if callable(part) else html_of(part) for part in parts_of(record)))

    return ir.codec.View(line, text, page)


# The parts of records


def _picture(chart_of: Callable[[Any], Chart], record: Any, said: str) -> _Part:
    def picture() -> str:
        chart = chart_of(record)
        return chart_html(chart, "", said) + key_html(chart)

    return picture


def _plan(plan: Plan) -> list[_Part]:
    plain, planned = plan.plain.peak_bytes, plan.predicted.peak_bytes
    bars = Bar("plain, predicted", plain, "plain"), Bar("planned, predicted", planned)
    picture, table = _frontier(plan)
    return [plan_table(plan), lambda: bars_html(bars, plan.budget_bytes), picture, Text(), table]


def _frontier(plan: Plan) -> list[_Part]:
    said = f"{len(plan.frontier)} plans by predicted peak and step time"
    return [_picture(frontier_chart, plan, said), frontier_table(plan)]


def _prediction(prediction: Prediction) -> list[_Part]:
    return [estimate_page(prediction, "Estimate"), lambda: stack_html(prediction.by_category)]


def _verification(verification: Verification) -> list[_Part]:
    plain = verification.plain_measured_peak_bytes
    bars = [] if plain is None else [Bar("plain, measured", plain, "plain")]
    bars += [
        Bar("planned, predicted", verification.predicted_peak_bytes),
        Bar("planned, measured", verification.measured_peak_bytes),
    ]
    return [verification_table(verification), lambda: bars_html(bars, verification.budget_bytes)]


def _comparison(comparison: Comparison) -> list[_Part]:
    plain, planned = comparison.plain_peak_bytes, comparison.planned_peak_bytes
    bars = Bar("plain, measured", plain, "plain"), Bar("planned, measured", planned)
    return [comparison_table(None, comparison), lambda: bars_html(bars, 0)]


def _ladder(ladder: Ladder) -> list[_Part]:
    said = f"{len(ladder.rungs)} rungs by measured peak and step time"
    return [_picture(ladder_chart, ladder, said), ladder_table(ladder)]


# What `repr` says, in a line


def _plan_line(plan: Plan) -> str:
    peaks = f"{format_bytes(plan.predicted.peak_bytes)} of {format_bytes(plan.plain.peak_bytes)}"
    speed = beside_text(plan.predicted.step_seconds, plan.plain.step_seconds, "plain")
    name, budget = f"{clean(plan.workload)!r} on {clean(plan.device)}", format_bytes(plan.budget_bytes)
    return f"for {name}: {peaks}, {speed}, budget {budget}, {plan.numerics}"


def _candidate_line(candidate: Candidate) -> str:
    sizes = f"{format_bytes(candidate.peak_bytes)}, {seconds_text(candidate.step_seconds)}"
    return f"{sizes}: {levers_text(candidate)}, {candidate.numerics}"


def _prediction_line(prediction: Prediction) -> str:
    upper = format_bytes(prediction.peak_upper_bytes)
    return f"{format_bytes(prediction.peak_bytes)}, at most {upper}, {seconds_text(prediction.step_seconds)} a step"


def _verification_line(found: Verification) -> str:
    state = "verified" if found.holds else f"failed, {len(found.failures)} failure{'s' * (len(found.failures) != 1)}"
    peak, budget = format_bytes(found.measured_peak_bytes), format_bytes(found.budget_bytes)
    return f"{state}: {found.numerics}, {peak} measured of a budget of {budget}"


def _comparison_line(comparison: Comparison) -> str:
    peaks = f"{format_bytes(comparison.plain_peak_bytes)} → {format_bytes(comparison.planned_peak_bytes)}"
    times = f"{seconds_text(comparison.plain_step_seconds)} → {seconds_text(comparison.planned_step_seconds)}"
    return f"{peaks}, {times} a step, over {len(comparison.planned_losses)} steps"


def _ladder_line(ladder: Ladder) -> str:
    kept = sum(rung.outcome == "kept" for rung in ladder.rungs)
    return f"for {clean(ladder.workload)!r} on {clean(ladder.device)}: {kept} of {len(ladder.rungs)} rungs kept"


def _fleet_line(fleet: Fleet) -> str:
    return f"for {clean(fleet.workload)!r}: {len(fleet.rows)} rows, {answer_lines(fleet)[0]}"


def _run_line(run: RunRecord) -> str:
    known = run.first_loss is not None and run.last_loss is not None
    losses = f", loss {run.first_loss:.4g} → {run.last_loss:.4g}" if known else ""
    return f"of {clean(run.workload)!r}: {run.status} after {run.steps:,} steps{losses}"


def _range_line(report: RangeReport) -> str:
    return f"of {len(report.modules)} modules: {report.precision}"


def _device_line(device: Device) -> str:
    return f"{clean(device.name)!r}, {clean(device.description)}: {format_bytes(device.memory_bytes)}"


def _timeline_line(timeline: Timeline) -> str:
    return f"{len(timeline.labels):,} operators, peak {format_bytes(timeline.peak_bytes)}"


# Progress


def with_bars(defaults: Defaults) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function show bars in a notebook, unless the call has progress arguments of its own.

    Calls from within memfit show none, since the outer call does.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def shown(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            interactive = sys.modules.get("IPython")
            shell = interactive.get_ipython() if interactive is not None else None
            if getattr(shell, "kernel", None) is None or is_called_by_memfit():
                return function(*args, **kwargs)
            with Bars(f"memfit.{function.__name__}") as bars:
                told: dict[str, Any] = {**defaults(bars, kwargs), **kwargs}
                return function(*args, **told)

        return shown

    return decorate


def stages(bars: Bars, arguments: Mapping[str, Any]) -> dict[str, Callable[..., None]]:
    """Return the `progress=` argument of a function with named stages."""
    return {"progress": bars}


@dataclass
class _Stage:
    done: int = 0
    total: int | None = None
    note: str = ""
    begun: float = field(default_factory=lambda: time.monotonic())

    def row(self, name: str) -> str:
        """Return its bar with the time left, at the speed so far."""
        state = f' value="{self.done}" max="{self.total}"' if self.total else ""
        told = [f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"]
        if self.total and 0 < self.done < self.total:
            left = (time.monotonic() - self.begun) * (self.total - self.done) / self.done
            told += [f"{format_seconds(left)} left"] if left >= 1 else []
        info = " · ".join([*told, *([self.note] if self.note else [])])
        bar = f"<td>{html.escape(name)}</td><td><progress{state}></progress></td><td>{html.escape(info)}</td>"
        return f"<tr>{bar}</tr>"


class Bars:
    """A bar for each reported stage; use it as a context manager. At the end it shows the call with its seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stages: dict[str, _Stage] = {}
        self._handle: Any = None
        self._shown = -1.0
        self._begun = time.monotonic()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._handle is None:
            return
        if error is None:
            text = f"{self._name}: {format_seconds(time.monotonic() - self._begun)}"
            self._show(text, f'<span style="opacity:.7">{html.escape(text)}</span>')
        else:
            self._show_bars()

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Report the progress of a stage."""
        state = self._stages.setdefault(stage, _Stage())
        state.done, state.total, state.note = done, total, note
        if done == total or time.monotonic() - self._shown >= _SECONDS_BETWEEN:
            self._show_bars()

    def _show_bars(self) -> None:
        self._shown = time.monotonic()
        text = ", ".join(f"{name} {stage.done}/{stage.total or '?'}" for name, stage in self._stages.items())
        rows = "".join(stage.row(name) for name, stage in self._stages.items())
        self._show(text, _framed(f"<table>{rows}</table>"))

    def _show(self, text: str, page: str) -> None:
        from IPython.display import display  # there, in a notebook

        output = {"text/plain": text, "text/html": page}
        if self._handle is None:
            self._handle = display(output, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(output, raw=True)

"""Self-contained HTML pages: that of a plan, what it does to the step's memory, and what training measured.

A page makes no requests, and its content security policy forbids them: `default-src 'none'`, and only the script with
the given hash may run.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.foundations import format_bytes
from memfit.report.charts import Chart, chart_html, css_name, key_html
from memfit.report.summary import MISSING, clean, seconds_text
from memfit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from memfit.ir import Comparison, ModuleRow, Plan, RunRecord, Views, write_atomic
from memfit.report.charts import MAX_POINTS, Bar, bars_html, draws_budget, second_axis
from memfit.report.figures import curve_chart, frontier_chart, shown_categories, timeline_chart
from memfit.report.next_steps import Report, next_steps
from memfit.report.summary import (
    change_text,
    comparison_lines,
    comparison_rows,
    lever_rows,
    loss_rows,
    measured_plan_rows,
    microbatches,
    place_lines,
    ratio_text,
    region_groups,
    retries_text,
    share_text,
    solver_text,
    waiting_text,
)
from memfit.report.verdict import offers, plan_verdict


def render_page(template: str, charts: Mapping[str, Chart], **context: Any) -> str:
    """Return a page of a template in this package, with charts by the name of their element."""

    def draw(name: str, text: str) -> str:
        return markup(chart_html(charts[name], name, text))

    return (
        _environment()
        .get_template(template)
        .render(
            context,
            version=__version__,
            charts=charts,
            draw=draw,
            symbols=lambda name: markup(key_html(charts[name])),
            hover=markup(_embedded({name: chart.hover for name, chart in charts.items()})),
            style=markup(resource("page.css") + resource("charts.css")),
            script=markup(resource("page.js")),
        )
    )


def markup(text: str) -> str:
    """Return text that templates insert as HTML."""
    from markupsafe import Markup  # a part of Jinja, imported late for the same reason

    return Markup(text)


def chart_page(chart: Chart, title: str, heading: str, text: str) -> str:
    """Return a page with one chart: its title, the heading, and a description for screen readers."""
    return render_page("chart.html.j2", {"chart": chart}, name="chart", title=title, heading=heading, text=text)


def resource(name: str) -> str:
    """Return a file of this package: a template, a style sheet or the script."""
    return importlib.resources.files("memfit.report").joinpath(name).read_text(encoding="utf-8")


def _environment() -> Environment:
    import jinja2  # imported late, since it would slow down the import of memfit

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "clean": clean,
        "css_name": css_name,
        "hash": _script_hash,
        "number": _number_text,
        "seconds": seconds_text,
    }
    return environment


def _script_hash(script: str) -> str:
    """Return the hash of an inline script for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def _embedded(record: Any) -> str:
    """Return JSON for a script element, without characters that could end the element."""
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _number_text(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:.5g}"


_MAX_ROWS, _MAX_MODULES = 400, 1000
_Row = TypeVar("_Row")


def write(
    path: str | Path,
    plan: Plan,
    views: Views,
    run: RunRecord | None,
    metrics: list[dict[str, Any]],
    folder: Path | None = None,
) -> Path:
    """Write the page to a file; see `render`.

    Raises:
        OutputError: The file can't be written.
    """
    return write_atomic(path, render(plan, views, run, metrics, folder).encode())


def render(
    plan: Plan, views: Views, run: RunRecord | None, metrics: list[dict[str, Any]], folder: Path | None = None
) -> str:
    """Return the page.

    Args:
        views: Its timelines before and after, its modules, and the comparison of both steps if there is one.
        metrics: A line for each step of the run, with the keys step, loss, grad_norm, skipped, loss_scale,
            seconds and peak_bytes, of which any but step may be missing or None. A line without a key, as
            that of an evaluation, is no gap in the curve; one with None is.
        folder: The run's folder, which commands name and whose checkpoints are named; None where it is not known.
    """
    report = Report(plan, views, run, metrics, folder)
    return render_page("page.html.j2", _charts(plan, views, metrics), **_context(report))


def _charts(plan: Plan, views: Views, metrics: Sequence[dict[str, Any]]) -> dict[str, Chart]:
    """Return the charts by the name of the element that each is drawn in."""
    shared: dict[str, Any] = {
        "categories": shown_categories(views.plain, views.planned),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": _tallest_bytes(views),
    }
    charts = {
        "before": timeline_chart(views.plain, **shared),
        "after": timeline_chart(views.planned, **shared),
        "frontier": frontier_chart(plan),
    }
    for key, name, axis in (("loss", "loss", None), ("seconds", "step time", second_axis)):
        lines = [line for line in metrics if key in line]
        if any(line[key] is not None for line in lines):
            charts[key] = curve_chart([line["step"] for line in lines], [line[key] for line in lines], name, axis)
    return charts


def _tallest_bytes(views: Views) -> int:
    return max(views.plain.peak_bytes, views.planned.peak_bytes)


def _context(report: Report) -> dict[str, Any]:
    """Return what the template reads, besides the charts."""
    plan, views, run = report.plan, report.views, report.run
    evaluations = run.evaluations if run else []
    verdict = plan_verdict(plan, views.comparison)
    return {
        "plan": plan,
        "run": run,
        "fits": verdict.startswith("Fits"),
        "verdict": verdict,
        "ratio": ratio_text(plan.predicted.step_seconds, plan.plain.step_seconds),
        "change": change_text(plan.predicted.peak_bytes, plan.plain.peak_bytes),
        "measured": _measured(views.comparison, run),
        "bars": markup(_bars(plan, views.comparison, run)),
        "gap": share_text(plan.solution.gap, 1),
        "solver": solver_text(plan),
        "levers": lever_rows(plan),
        "regions": region_groups(plan.levers.regions),
        "plans_run": measured_plan_rows(plan),
        "offers": offers(plan),
        "places": (place_lines(plan.plain), place_lines(plan.predicted)),
        "budget_is_far": not draws_budget(plan.budget_bytes, _tallest_bytes(views)),
        "microbatches": microbatches(plan),
        "thinned": max(len(views.plain.labels), len(views.planned.labels)) > MAX_POINTS,
        "categories": _category_rows(views),
        "views": views,
        "views_change": change_text(views.planned.peak_bytes, views.plain.peak_bytes),
        "largest_saved": max([1, *(max(row.saved_bytes, row.planned_saved_bytes) for row in views.modules)]),
        "comparison": comparison_rows(plan, views.comparison, run),
        "comparison_lines": comparison_lines(views.comparison, plan) if views.comparison else [],
        "loss_rows": _ends(loss_rows(views.comparison), _MAX_ROWS) if views.comparison else [],
        "evaluation_keys": sorted({key for evaluation in evaluations for key in evaluation.values}),
        "waiting": waiting_text(run) if run else None,
        "retries": retries_text(run) if run else None,
        "skipped": sum(bool(line.get("skipped")) for line in report.metrics),
        "modules": largest_modules(views.modules),
        "events": _ends(run.events if run else [], _MAX_ROWS),
        "evaluations": _ends(evaluations, _MAX_ROWS),
        "steps": next_steps(report),
    }


def _measured(comparison: Comparison | None, run: RunRecord | None) -> dict[str, str | None]:
    """Return the measured figures of the headline: from the comparison, or else from the run."""
    peak_bytes = comparison.planned_peak_bytes if comparison else run.measured_peak_bytes if run else None
    ratio = comparison and ratio_text(comparison.planned_step_seconds, comparison.plain_step_seconds)
    seconds = run.step_seconds if run else None
    return {
        "peak": None if peak_bytes is None else format_bytes(peak_bytes),
        "ratio": ratio or None,
        "step": None if seconds is None else seconds_text(seconds),
    }


def _bars(plan: Plan, comparison: Comparison | None, run: RunRecord | None) -> str:
    """Return the bars of the headline."""
    rows = [Bar("plain, predicted", plan.plain.peak_bytes, "plain")]
    if comparison:
        rows.append(Bar("plain, measured", comparison.plain_peak_bytes, "plain"))
    rows.append(Bar("planned, predicted", plan.predicted.peak_bytes))
    measured = comparison.planned_peak_bytes if comparison else run.measured_peak_bytes if run else None
    if measured is not None:
        rows.append(Bar("planned, measured", measured))
    return bars_html(rows, plan.budget_bytes)


def _category_rows(views: Views) -> list[tuple[str, str, str, str]]:
    """Return, for each category, its bytes at the peak before and after, and the change."""
    before, after = (timeline.at_peak() if timeline.labels else {} for timeline in (views.plain, views.planned))
    rows = []
    for name in shown_categories(views.plain, views.planned):
        old, new = before.get(name, 0), after.get(name, 0)
        change = "unchanged" if new == old else format_bytes(new - old).replace("-", "−")
        rows.append((name, format_bytes(old), format_bytes(new), f"+{change}" if new > old else change))
    return rows


def largest_modules(modules: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Return the modules that hold the most, in the order of the model: all, unless there are very many."""
    most = sorted(range(len(modules)), key=lambda i: -max(modules[i].saved_bytes, modules[i].parameter_bytes))
    return [modules[i] for i in sorted(most[:_MAX_MODULES])]


def _ends(rows: Sequence[_Row], limit: int) -> list[_Row]:
    """Return the first and the last of many rows, and all of few."""
    return list(rows) if len(rows) <= limit else [*rows[: limit // 2], *rows[-limit // 2 :]]

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
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.foundations import __version__, format_bytes
from memfit.ir import Views
from memfit.report import summary
from memfit.report.charts import (
    MAX_POINTS,
    Bar,
    Chart,
    bars_html,
    chart_html,
    css_name,
    curve_chart,
    draws_budget,
    frontier_chart,
    key_html,
    second_axis,
    shown_categories,
    timeline_chart,
)
from memfit.report.next_steps import Report
from memfit.report.summary import clean, ratio_text, seconds_text

_MAX_ROWS, _MAX_MODULES = 400, 1000


def render_page(template: str, charts: Mapping[str, Chart], **context: Any) -> str:
    """Return a page of a template in this package, with charts by the name of their element."""
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
        "ends": lambda rows: [*rows[: _MAX_ROWS // 2], *rows[-_MAX_ROWS // 2 :]] if len(rows) > _MAX_ROWS else rows,
        "hash": lambda script: f"sha256-{base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()}",
        "number": lambda value: summary.MISSING if value is None or not math.isfinite(value) else f"{value:.5g}",
        "seconds": seconds_text,
    }
    hover = json.dumps({name: c.hover for name, c in charts.items()}, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # which could end the script's element
        hover = hover.replace(character, f"\\u{ord(character):04x}")
    page = environment.get_template(template)
    return page.render(
        context,
        version=__version__,
        charts=charts,
        draw=lambda name, text: markup(chart_html(charts[name], name, text)),
        symbols=lambda name: markup(key_html(charts[name])),
        hover=markup(hover),
        style=markup(resource("page.css") + resource("charts.css")),
        script=markup(resource("page.js")),
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


def plan_page(report: Report) -> str:
    """Return a plan's page."""
    plan, views, run, metrics = report.plan, report.views, report.run, report.metrics
    comparison = views.comparison
    tallest_bytes = max(views.plain.peak_bytes, views.planned.peak_bytes)
    categories = shown_categories(views.plain, views.planned)
    shared: dict[str, Any] = {"categories": categories, "budget_bytes": plan.budget_bytes, "peak_bytes": tallest_bytes}
    charts = {
        "before": timeline_chart(views.plain, **shared),
        "after": timeline_chart(views.planned, **shared),
        "frontier": frontier_chart(plan),
    }
    for key, name, axis in (("loss", "loss", None), ("seconds", "step time", second_axis)):
        lines = [line for line in metrics if key in line]
        if any(line[key] is not None for line in lines):
            charts[key] = curve_chart([line["step"] for line in lines], [line[key] for line in lines], name, axis)

    bars = [Bar("plain, predicted", plan.plain.peak_bytes, "plain")]
    bars += [Bar("plain, measured", comparison.plain_peak_bytes, "plain")] if comparison else []
    bars.append(Bar("planned, predicted", plan.predicted.peak_bytes))
    peak_bytes = comparison.planned_peak_bytes if comparison else run.measured_peak_bytes if run else None
    bars += [] if peak_bytes is None else [Bar("planned, measured", peak_bytes)]
    ratio = ratio_text(comparison.planned_step_seconds, comparison.plain_step_seconds) if comparison else None
    seconds = run.step_seconds if run else None
    measured = {  # from the comparison, or else from the run
        "peak": None if peak_bytes is None else format_bytes(peak_bytes),
        "ratio": ratio or None,
        "step": None if seconds is None else seconds_text(seconds),
    }
    sizes = [max(row.saved_bytes, row.parameter_bytes) for row in views.modules]
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    verdict = summary.plan_verdict(plan, comparison)
    return render_page(
        "page.html.j2",
        charts,
        words=summary,
        plan=plan,
        run=run,
        views=views,
        metrics=metrics,
        fits=verdict.startswith("Fits"),
        verdict=verdict,
        measured=measured,
        bars=markup(bars_html(bars, plan.budget_bytes)),
        budget_is_far=not draws_budget(plan.budget_bytes, tallest_bytes),
        thinned=max(len(views.plain.labels), len(views.planned.labels)) > MAX_POINTS,
        categories=_category_rows(views, categories),
        largest_saved=max([1, *(max(row.saved_bytes, row.planned_saved_bytes) for row in views.modules)]),
        evaluation_keys=sorted({key for evaluation in run.evaluations for key in evaluation.values} if run else ()),
        modules=[views.modules[i] for i in sorted(largest[:_MAX_MODULES])],
        steps=report.next_steps(),
    )


def _category_rows(views: Views, categories: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return, for each category, its bytes at the peak before and after, and the change."""
    before, after = (timeline.at_peak() if timeline.labels else {} for timeline in (views.plain, views.planned))
    rows = []
    for name in categories:
        old, new = before.get(name, 0), after.get(name, 0)
        change = "unchanged" if new == old else format_bytes(new - old).replace("-", "−")
        rows.append((name, format_bytes(old), format_bytes(new), f"+{change}" if new > old else change))
    return rows

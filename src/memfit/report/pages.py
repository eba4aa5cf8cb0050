"""Self-contained HTML pages.

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
from memfit.report.axes import css_name
from memfit.report.charts import Chart, chart_html, key_html
from memfit.report.summary import MISSING, clean, seconds_text
from memfit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment


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

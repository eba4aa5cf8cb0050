"""Makes `docs/results/published.md` from the committed result of `benchmarks.published`.

`python -m benchmarks.published.page [--check]`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import Case
from benchmarks.markdown import head, made_by, row
from benchmarks.published.figures import WITHIN_SECONDS
from benchmarks.published.rows import Source, sources
from benchmarks.tables import ROOT, results
from memfit.foundations import format_bytes, format_seconds
from memfit.ir import write_atomic

PAGE = ROOT / "docs" / "results" / "published.md"
TEMPLATE = Path(__file__).with_name("page.md")
_MOST_LINES = 24
_KINDS = {"allocated": "allocated", "after": "after the step", "reserved": "reserved", "process": "whole process"}


def page(result: dict[str, Any]) -> str:
    """Return the page for a result of `benchmarks.published`."""
    summary = result["summary"]
    convolved = sorted(abs(case["errors"]["process"]) for case in result["cases"] if case["source"] == "gpumemnet")
    widths = summary["left_out_widths"].values()
    left = [abs(case["errors"]["step"]) for case in result["cases"] if _is_left_out_of_the_fit(case)]
    return TEMPLATE.read_text().format(
        summary=summary_table(summary),
        rows=summary["rows"],
        sources=summary["sources"],
        tables="\n\n".join(_section(source, result["cases"], name) for name, source in sources().items()),
        made=made_by(result),
        conv_count=len(convolved),
        conv_median=_percent(statistics.median(convolved), 1),
        widths=f"{min(widths):.2f} to {max(widths):.2f}",
        left_out_within=_percent(summary["within_left_out_interval"], 0),
        left_count=len(left),
        left_share=_percent(sum(error <= WITHIN_SECONDS for error in left) / max(1, len(left)), 0),
    )


def _is_left_out_of_the_fit(case: Case) -> bool:
    """Tell whether a row has a time, and no rate was chosen with its group in view."""
    timed = "step" in case.get("published", {})
    return timed and case["source"] != "book" and not case["id"].startswith("LK-01")


def summary_table(summary: dict[str, Any]) -> str:
    """Return what the rows add up to."""
    lines = head(("figure", "of", "median error", "90th percentile"))
    for title, key in (("allocated", "allocated"), ("reserved, and whole process with the context", "device")):
        errors = [_percent(summary[f"{key}_{which}_abs_error"]) for which in ("median", "p90")]
        lines.append(row([title, str(summary[f"{key}_figures"]), *errors]))
    lines += ["", *head(("question", "of", "right"))]
    shares = (
        ("measured bytes within the stated interval", "byte_figures", "within_interval"),
        ("fits, or does not", "fit_figures", "fit_right"),
        ("step time within 30 %", "times", "time_within_30_percent"),
        ("ratio of two settings' times within 15 %", "time_ratios", "time_ratio_within_15_percent"),
    )
    for title, count, key in shares:
        lines.append(row([title, str(summary[count]) if count else "", _percent(summary[key], 0)]))
    return "\n".join(lines)


def _section(source: Source, cases: list[Case], name: str) -> str:
    """Return a source's rows."""
    own = [case for case in cases if case["source"] == name]
    parts = [f"### {source.title}"]
    if own:
        parts += [f"[{source.url.removeprefix('https://')}]({source.url}): {source.at}. Assumed: {source.assumed}."]
        absent = len(source.rows) - len(own)
        parts += _tables(own)
        if absent:
            parts.append(f"{absent} more rows of this source are in `rows.toml` and were not run for this page.")
    elif source.rows:
        parts.append(f"{len(source.rows)} rows are in `rows.toml` and were not run for this page.")
    if source.left_out:
        lines = head(("left out", "why"))
        parts.append("\n".join((*lines, *(row([ids, reason]) for ids, reason in source.left_out.items()))))
    return "\n\n".join(parts)


def _tables(cases: Iterable[Case]) -> list[str]:
    """Return cases in tables of a length that is read at once, those of one row of the source together."""
    tables: list[list[str]] = []
    for _, group in itertools.groupby(cases, lambda case: case["id"].partition("/")[0]):
        lines = [line for case in group for line in _rows(case)]
        if not tables or len(tables[-1]) + len(lines) > _MOST_LINES:
            tables.append([])
        tables[-1] += lines
    return ["\n".join((*head(("row", "step", "figure", "measured", "predicted", "error")), *t)) for t in tables]


def _rows(case: Case) -> list[str]:
    """Return the table's lines for a case: one for each published figure."""
    start = [f"{case['id']} ({case['grade']})", _step(case)]
    if "failed" in case:
        return [row([*start, "", "", "failed", case["failed"].partition("\n")[0]])]
    lines = []
    for name, kind in _KINDS.items():
        if name in case["published"]:
            measured, predicted = case["published"][name], case["predicted"][name]
            lines.append(row([*start, kind, _bytes(measured), _bytes(predicted), f"{case['errors'][name]:+.2%}"]))
    if "step" in case["published"]:
        measured, predicted = case["published"]["step"], case["predicted"]["step"]
        error = f"{case['errors']['step']:+.0%}"
        lines.append(row([*start, "time", format_seconds(measured), format_seconds(predicted), error]))
    if "published_fits" in case:
        said = ["fits" if fits else "does not fit" for fits in (case["published_fits"], case["fits"])]
        if case["fits"] and case["retries"]:
            said[1] += f", with {case['retries']} retries in two steps"
        right = "right" if case["fits"] == case["published_fits"] else "**wrong**"
        lines.append(row([*start, "fit", *said, right]))
    return lines


def _step(case: Case) -> str:
    options = ", ".join(f"{name} {value}" for name, value in case["options"].items())
    return f"{case['what']}; {case['device']}" + (f" ({options})" if options else "")


def _bytes(nbytes: float) -> str:
    return format_bytes(int(nbytes))


def _percent(share: float | None, digits: int = 2) -> str:
    return "" if share is None else f"{share:.{digits}%}".replace("%", " %")


def main() -> None:
    """Write the page, or check that it is that of the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page has other figures")
    text = page(results("published"))
    if parser.parse_args().check:
        stale = not PAGE.exists() or PAGE.read_text() != text
        told = "docs/results/published.md is not that of benchmarks/results; run benchmarks.published.page"
        sys.exit(told if stale else 0)
    write_atomic(PAGE, text.encode())


if __name__ == "__main__":
    main()

"""Makes `docs/results/frontier.md`, its charts and its CSV files from the newest committed result.

`python -m benchmarks.frontier.page [--check]`. The words around the tables are those of the page itself.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.charts import COLOURS, Axis, Line, Panel, chart
from benchmarks.common import Case
from benchmarks.frontier.cells import AT_BOUND, FASTER, FIGURED, LIMIT, SURE, Cell, cells_of
from benchmarks.frontier.methods import KINDS, OURS, Kind
from benchmarks.frontier.models import SUBJECTS
from benchmarks.pages import DOCS, main
from memfit.foundations import format_bytes

PAGE = DOCS / "results" / "frontier.md"

COLUMNS = (
    "method",
    "setting",
    "peak_bytes",
    "plain_peak_bytes",
    "above_parameters_bytes",
    "ratio",
    "ratio_error",
    "bitwise",
    "gradient_difference",
    "gradient_difference_beyond_rounding",
    "loss_difference",
    "plan_seconds",
    "error_message",
)
"""Of the CSV files; `ratio` is the step's time over the plain one's, `ratio_error` its standard error."""
BY_HAND = "by hand"
FAMILIES = {
    "torch sac_milp": "sac_milp",
    "xFormers as it comes": "xFormers",
    "xFormers' policy, memory_budget": "xFormers",
    OURS: OURS,
}
"""Methods with a line of their own; all others are what users set by hand."""
_COLOURS = dict(zip((OURS, BY_HAND, "sac_milp", "xFormers"), COLOURS, strict=True))
OVERVIEW = ("gpt", "unet")
"""Models of the chart that stands in the README."""
_BUDGETS = (0.2, 0.3, 0.45, 0.6, 0.75, 1.0)
_TIMES = (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)


def tables(result: dict[str, Any]) -> str:
    """Return what the page says of a result: the sum, and for each model its chart and its cells, folded."""
    rows = result["cases"]
    parts = [summary_table(result)]
    for model in dict.fromkeys(row["model"] for row in rows):
        parts.append(f"## {model}\n\n{SUBJECTS[model].note}.")
        for kind in KINDS:
            cells = [cell for cell in cells_of(rows, kind) if cell.model == model]
            if not cells:
                continue
            if kind == "eager":
                parts.append(f"![Time over peak, {model}](../figures/{chart_path(model).name})")
            name = csv_path(model, kind).name
            parts.append(
                f'<details markdown="1"><summary>{kind.capitalize()}: memfit and the fastest peer under each budget'
                f"</summary>\n\n{cells_table(cells)}\n\n</details>\n\n"
                f"Every method and setting, {kind}: [{name}](frontier/{name})."
            )
    return "\n\n".join(parts)


def summary_table(result: dict[str, Any]) -> str:
    """Return the figures that hold for all models."""
    summary = result["summary"]
    kinds = [kind for kind in FIGURED if kind in summary]
    lines = [_row(["", *kinds]), _row(["---"] * (1 + len(kinds)))]
    words = {
        "worst_ratio_to_best_peer": "memfit's step time over the fastest peer that fits, at worst",
        "median_ratio_to_best_peer": "… in the median",
        "share_below_60_faster_or_at_bound": (
            f"of the cells below 60 %, memfit is {1 - FASTER:.0%} faster or within {AT_BOUND:.0%} of the bound in"
        ),
        "budget_violations": "plans whose measured peak is over their budget",
        "largest_gap": "largest proven gap of a plan",
        "cells": "cells (a model under a budget)",
        "reached_by_memfit_only": "… that no peer reaches and memfit does",
    }
    for key, text in words.items():
        lines.append(_row([text, *(_figure(key, summary[kind][key]) for kind in kinds)]))
    lowest = [
        max(filter(None, summary[kind]["lowest_peak_ratio_to_best_peer"].values()), default=None) for kind in kinds
    ]
    lines.append(_row(["memfit's lowest peak over that of all peers, at worst", *(_figure("", v) for v in lowest)]))
    failed = [f"- {text}" for kind in kinds for text in summary[kind]["failures"]]
    if failed:
        lines += [
            "",
            f"Where memfit takes over {LIMIT} × the fastest peer's time, or misses a budget that one reaches:",
        ]
        lines += ["", *failed]
    growing = [f"- {text}" for kind in kinds for text in summary[kind]["measured_time_grows"]]
    if growing:
        lines += ["", f"Where a larger budget takes longer, by over {SURE} standard errors:", "", *growing]
    dates = sorted({row["date"] for row in result["cases"]})
    threads = " or ".join(str(n) for n in sorted({row["threads"] for row in result["cases"] if "threads" in row}))
    source = (
        f"`{result['command']}`, {result['machine']['description']}, threads: {threads}, torch"
        f" {result['versions']['torch']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )
    return "\n".join([*lines, "", source])


def _figure(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if "share" in key else f"{value:.1%}" if "gap" in key else _number(value)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def cells_table(cells: Sequence[Cell]) -> str:
    """Return memfit beside the fastest peer under each budget."""
    headings = ("budget", "memfit: peak", "time", "the fastest peer that fits", "peak", "time", "memfit to peer")
    lines = [_row(headings), _row(["---"] * len(headings))]
    for cell in cells:
        peer = ["none", "", ""] if cell.best is None else [_named(cell.best), *_peak_and_time(cell.best)]
        ours = _peak_and_time(cell.ours) if "peak_bytes" in cell.ours else ["no plan fits", ""]
        ratio = "" if cell.ratio is None else f"{cell.ratio:.3f}"
        lines.append(_row([f"{cell.share:.0%}, {format_bytes(cell.budget_bytes)}", *ours, *peer, ratio]))
    return "\n".join(lines)


def rows_csv(rows: Sequence[Case], model: str, kind: str) -> str:
    """Return every method and setting of a model, as comma-separated values."""
    written = io.StringIO()
    table = csv.DictWriter(written, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for row in rows:
        if (row["model"], row["kind"]) == (model, kind):
            error = " ".join(row.get("error_message", "").split())
            figures = {key: f"{row[key]:.4g}" for key in COLUMNS if isinstance(row.get(key), float)}
            table.writerow(row | figures | {"error_message": error})
    return written.getvalue()


def _named(row: Case) -> str:
    return _escaped(f"{row['method']} {row['setting']}".strip())


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _peak_and_time(row: Case) -> list[str]:
    return [f"{row['peak_bytes'] / row['plain_peak_bytes']:.1%}", f"{row['ratio']:.3f}"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def csv_path(model: str, kind: str) -> Path:
    """Return where all rows of a model are."""
    return PAGE.parent / "frontier" / f"{model}-{kind}.csv"


def chart_path(model: str, kind: Kind = "eager") -> Path:
    """Return where a model's chart is."""
    return DOCS / "figures" / f"frontier-{model}{'' if kind == 'eager' else f'-{kind}'}.svg"


def model_chart(rows: Sequence[Case], model: str, kind: Kind = "eager") -> str:
    """Return the chart of a model: for each family the points that none of its others beats in both time and peak."""
    return _charted(f"Time over peak, {model}", [Panel("", family_lines(rows, model, kind))])


def overview_chart(rows: Sequence[Case], models: Sequence[str] = OVERVIEW) -> str:
    """Return the chart of some models side by side, for those who see one picture only."""
    panels = [Panel(SUBJECTS[model].note.split(";")[0], family_lines(rows, model, "eager")) for model in models]
    return _charted("Step time over peak memory", panels)


def family_lines(rows: Sequence[Case], model: str, kind: Kind) -> list[Line]:
    """Return a line for each family of methods, without what takes more than the plain step."""
    families: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (row["model"], row["kind"]) == (model, kind) and "peak_bytes" in row:
            family, share = FAMILIES.get(row["method"], BY_HAND), row["peak_bytes"] / row["plain_peak_bytes"]
            if share <= 1:
                families.setdefault(family, []).append((share, row["ratio"]))
    order = [name for name in dict.fromkeys((BY_HAND, *FAMILIES.values())) if name in families]
    return [Line(name, pareto(families[name]), _COLOURS[name]) for name in order]


def _charted(title: str, panels: Sequence[Panel]) -> str:
    lines = [line for panel in panels for line in panel.lines]
    peaks, times = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    legend = {line.label: line for line in reversed(lines)}
    return chart(
        title,
        "Both relative to the plain step; lower and further left is better",
        panels,
        Axis("peak, of the plain step's", _around(_BUDGETS, peaks), lambda value: f"{value:.0%}"),
        Axis("time", _around(_TIMES, times), lambda value: f"{value:g}"),
        legend=list(legend.values()),
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (peak, time) that no other point has both less of, by rising peak."""
    found: list[tuple[float, float]] = []
    for peak, ratio in sorted(points):
        if not found or ratio < found[-1][1]:
            found.append((peak, ratio))
    return found


def _around(ticks: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the ticks that lie around some values."""
    low = max((t for t in ticks if t <= min(values)), default=ticks[0])
    high = min((t for t in ticks if t >= max(values)), default=ticks[-1])
    return [t for t in ticks if low <= t <= high]


def page(text: str, result: dict[str, Any]) -> str:
    """Return the page with its tables made anew."""
    pattern = r"(<!-- frontier: [^>]*-->\n).*?(<!-- /frontier -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{tables(result)}\n{match[2]}", text, flags=re.DOTALL)


def files(result: dict[str, Any]) -> dict[Path, str]:
    """Return the page, its charts and its CSV files."""
    models = dict.fromkeys(row["model"] for row in result["cases"] if row["kind"] == "eager" and "ratio" in row)
    charts = {chart_path(model): model_chart(result["cases"], model) for model in models}
    pairs = dict.fromkeys((row["model"], row["kind"]) for row in result["cases"])
    sheets = {csv_path(model, kind): rows_csv(result["cases"], model, kind) for model, kind in pairs}
    overview = {DOCS / "figures" / "frontier.svg": overview_chart(result["cases"])}
    return {PAGE: page(PAGE.read_text(), result), **charts, **overview, **sheets}


if __name__ == "__main__":
    main("benchmarks.frontier.page", "frontier", files, __doc__)

"""Makes `docs/frontier.md` and its charts from the newest committed result.

`python -m benchmarks.frontier.page [--check]`. The words around the tables are those of the page itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.charts import COLOURS, Axis, Line, Panel, chart
from benchmarks.claims_page import DOCS, stale
from benchmarks.common import Case
from benchmarks.frontier.cells import AT_BOUND, FASTER, LIMIT, SURE, Cell, cells_of
from benchmarks.frontier.methods import OURS, Kind
from benchmarks.frontier.models import SUBJECTS
from benchmarks.tables import results
from memfit.ir.codec import write_atomic
from memfit.units import format_bytes

PAGE = DOCS / "frontier.md"
BY_HAND = "by hand"
FAMILIES = {"torch sac_milp": "sac_milp", "xFormers' policy, memory_budget": "xFormers", OURS: OURS}
"""Methods with a line of their own; all others are what users set by hand."""
_BUDGETS = (0.2, 0.3, 0.45, 0.6, 0.75, 1.0)
_TIMES = (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)


def tables(result: dict[str, Any]) -> str:
    """Return what the page says of a result: the sum, and for each model its chart, its cells and all of its rows."""
    rows = result["cases"]
    parts = [summary_table(result)]
    for model in dict.fromkeys(row["model"] for row in rows):
        parts.append(f"## {model}\n\n{SUBJECTS[model].note}.")
        for kind in ("eager", "compiled", "joint"):
            cells = [cell for cell in cells_of(rows, kind) if cell.model == model]
            if not cells:
                continue
            if kind == "eager":
                parts.append(f"![Time over peak, {model}](figures/{chart_path(model).name})")
            parts += [f"### {kind.capitalize()}", cells_table(cells), rows_table(rows, model, kind)]
    return "\n\n".join(parts)


def summary_table(result: dict[str, Any]) -> str:
    """Return the figures that hold for all models."""
    summary = result["summary"]
    kinds = [kind for kind in ("eager", "compiled") if kind in summary]
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


def rows_table(rows: Sequence[Case], model: str, kind: str) -> str:
    """Return every method and setting of a model."""
    headings = ("method", "peak", "of plain", "above parameters", "time to plain's", "gradients", "seconds to plan")
    lines = ["<details><summary>Every method</summary>", "", _row(headings), _row(["---"] * len(headings))]
    for row in rows:
        if (row["model"], row["kind"]) != (model, kind):
            continue
        if "peak_bytes" not in row:
            lines.append(_row([_named(row), *[""] * 5, _escaped(row["error_message"])]))
            continue
        lines.append(
            _row(
                [
                    _named(row),
                    format_bytes(row["peak_bytes"]),
                    f"{row['peak_bytes'] / row['plain_peak_bytes']:.1%}",
                    format_bytes(row["above_parameters_bytes"]),
                    f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}",
                    _gradients(row),
                    f"{row['plan_seconds']:.1f}",
                ]
            )
        )
    return "\n".join([*lines, "", "</details>"])


def _gradients(row: Case) -> str:
    if row["bitwise"]:
        return "bitwise equal"
    beyond = row.get("gradient_difference_beyond_rounding")  # not in earlier results
    rounding = "" if beyond is None else f", {beyond:.0e} beyond rounding"
    return f"{row['gradient_difference']:.0e} off{rounding}, the loss {row['loss_difference']:.0e}"


def _named(row: Case) -> str:
    return _escaped(f"{row['method']} {row['setting']}".strip())


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _peak_and_time(row: Case) -> list[str]:
    return [f"{row['peak_bytes'] / row['plain_peak_bytes']:.1%}", f"{row['ratio']:.3f}"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def chart_path(model: str, kind: Kind = "eager") -> Path:
    """Return where a model's chart is."""
    return DOCS / "figures" / f"frontier-{model}{'' if kind == 'eager' else f'-{kind}'}.svg"


def model_chart(rows: Sequence[Case], model: str, kind: Kind = "eager") -> str:
    """Return the chart of a model: for each family the points that none of its others beats in both time and peak."""
    lines = []
    here = [r for r in rows if r["model"] == model and r["kind"] == kind and "peak_bytes" in r]
    families: dict[str, list[tuple[float, float]]] = {}
    for row in here:
        family = FAMILIES.get(row["method"], BY_HAND)
        families.setdefault(family, []).append((row["peak_bytes"] / row["plain_peak_bytes"], row["ratio"]))
    for index, (family, points) in enumerate(sorted(families.items(), key=lambda item: item[0] != OURS)):
        lines.append(Line(family, pareto(points), COLOURS[index], 14.0 * index - 14.0))
    peaks = [x for line in lines for x, _ in line.points]
    times = [y for line in lines for _, y in line.points]
    return chart(
        f"Time over peak, {model}",
        "Both over the plain step's; the whole step, parameters included",
        [Panel("", lines)],
        Axis("peak, of the plain step's", _around(_BUDGETS, peaks), lambda value: f"{value:.0%}"),
        Axis("time, of the plain step's", _around(_TIMES, times), lambda value: f"{value:g}"),
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
    """Return the page and its charts."""
    models = dict.fromkeys(row["model"] for row in result["cases"] if row["kind"] == "eager" and "ratio" in row)
    charts = {chart_path(model): model_chart(result["cases"], model) for model in models}
    return {PAGE: page(PAGE.read_text(), result), **charts}


def main() -> None:
    """Write the page, or check that it is that of the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the page has other figures")
    made = files(results("frontier"))
    if parser.parse_args().check:
        found = stale(made)
        sys.exit(f"other than benchmarks/results: {', '.join(found)}; run benchmarks.frontier.page" if found else 0)
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text.encode())


if __name__ == "__main__":
    main()

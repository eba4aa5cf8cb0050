"""Makes the tables of docs/results/frameworks.md from the newest results: `python -m benchmarks.frameworks.page`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.markdown import head, row
from benchmarks.tables import RESULTS, results
from memfit.foundations import format_bytes, format_seconds
from memfit.ir import write_atomic

PAGE = Path(__file__).parents[2] / "docs" / "results" / "frameworks.md"
_MARKS = re.compile(r"(<!-- (?P<name>frameworks|keras): [^>]*-->\n).*?(<!-- /(?P=name) -->)", flags=re.DOTALL)


def table(result: dict[str, Any]) -> str:
    """Return a line for each model, framework and kind of step."""
    lines = ["| model | framework | step | own peak | process | time | last loss |", "| --- " * 7 + "|"]
    for case in result["cases"]:
        budget = case["budget_bytes"]
        cells = [
            case["model"],
            {"torch": "PyTorch", "jittor": "Jittor"}[case["framework"]],
            f"planned for {format_bytes(budget)}" if budget else "plain",
            format_bytes(case["own_peak_bytes"]),
            format_bytes(case["process_peak_bytes"]),
            format_seconds(case["step_seconds"]),
            f"{case['losses'][-1]:.5f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{result['command']}`, {result['machine']['description']}, {result['date']}."])


def keras_table(result: dict[str, Any]) -> str:
    """Return a line for each model and way to save memory in Keras."""
    headings = ("model", "step", "predicted", "peak", "", "time", "", "gradients", "statistics")
    lines = head(headings)
    plain: dict[str, Any] = {}
    for case in result["cases"]:
        plain = case if case["way"] == "plain" else plain
        budget = f" for {format_bytes(case['budget_bytes'])}" if case["budget_bytes"] else ""
        predicted = case["predicted_peak_bytes"]
        cells = [
            case["model"],
            f"{case['way']}{budget}",
            "" if predicted is None else format_bytes(predicted),
            format_bytes(case["own_peak_bytes"]),
            f"×{case['own_peak_bytes'] / plain['own_peak_bytes']:.2f}",
            format_seconds(case["step_seconds"]),
            f"×{case['step_seconds'] / plain['step_seconds']:.2f}",
            *(_equal(case[key]) for key in ("gradient_difference", "statistics_difference")),
        ]
        lines.append(row(cells))
    versions, where = result["summary"]["versions"], result["machine"]["description"]
    made = f"Keras {versions['keras']}, TensorFlow {versions['tensorflow']}, {result['date']}"
    return "\n".join([*lines, "", f"`{result['command']}`, {where}, {made}."])


def _equal(difference: float) -> str:
    return "same bits" if difference == 0 else f"{difference:.0e} apart"


TABLES = {"frameworks": table, "keras": keras_table}


def with_table(text: str) -> str:
    """Return the page with its tables made anew; empty where no result is committed."""

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        known = f"{TABLES[name](results(name))}\n" if list(RESULTS.glob(f"{name}-*.json")) else ""
        return f"{match[1]}{known}{match[3]}"

    return _MARKS.sub(made, text)


if __name__ == "__main__":
    write_atomic(PAGE, with_table(PAGE.read_text()).encode())

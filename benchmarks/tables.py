"""Makes the README's tables from the committed result files: `python -m benchmarks.tables [--check]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from memfit.ir.codec import write_atomic
from memfit.units import format_bytes

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> dict[str, Any]:
    """Return the newest committed result of a benchmark."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}-*.json"))]
    newest: dict[str, Any] = max(found, key=lambda result: str(result["date"]))
    return newest


def prediction_table(result: dict[str, Any]) -> str:
    """Return predicted against measured peaks: for each workload, the plain step and its lowest plan."""
    headings = (
        "workload",
        "precision",
        "class",
        "plain, measured",
        "lowest, predicted",
        "measured",
        "budgets",
        "largest error",
    )
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    plain = {(c["workload"], c["precision"]): c for c in result["cases"] if c["numerics"] == "plain"}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for case in result["cases"]:
        if case["numerics"] != "plain":
            groups.setdefault((case["workload"], case["precision"], case["numerics"]), []).append(case)
    for (workload, precision, numerics), cases in groups.items():
        lowest = min(cases, key=lambda c: int(c["budget_bytes"]))
        worst = max(abs(c["error"]) for c in [*cases, plain[workload, precision]])
        cells = [
            workload,
            precision,
            numerics,
            format_bytes(plain[workload, precision]["measured_peak_bytes"]),
            format_bytes(lowest["predicted_peak_bytes"]),
            format_bytes(lowest["measured_peak_bytes"]),
            str(len(cases)),
            f"{worst:.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    summary = result["summary"]
    lines += [
        "",
        f"{summary['cases']} steps, plain and planned, over budgets from 90 % of the plain peak down to the lowest that"
        f" memfit says fits: predicted peaks were at most {summary['largest_error']:.2%} off"
        f" ({summary['mean_error']:.2%} on average), and {summary['over_budget']} of {summary['planned']} planned steps"
        f" went over their budget. `{result['command']}`, {result['machine']['description']},"
        f" {result['machine']['threads']} threads, torch {result['versions']['torch']}, {result['date']}.",
    ]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """Return the README with its tables made anew."""
    table = prediction_table(results("prediction"))
    pattern = r"(<!-- prediction: [^>]*-->\n).*?(<!-- /prediction -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)


def main() -> None:
    """Write the README's tables, or check that they are those of the result files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the README has other figures")
    text = README.read_text()
    made = with_tables(text)
    if parser.parse_args().check:
        sys.exit(0 if made == text else "README.md has other figures than benchmarks/results: run benchmarks.tables")
    write_atomic(README, made.encode())


if __name__ == "__main__":
    main()

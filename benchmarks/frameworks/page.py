"""Makes the table of docs/results/frameworks.md from the newest result: `python -m benchmarks.frameworks.page`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS, results
from memfit.ir.codec import write_atomic
from memfit.units import format_bytes, format_seconds

PAGE = Path(__file__).parents[2] / "docs" / "results" / "frameworks.md"
_MARKS = re.compile(r"(<!-- frameworks: [^>]*-->\n).*?(<!-- /frameworks -->)", flags=re.DOTALL)


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


def with_table(text: str) -> str:
    """Return the page with its table made anew; empty where no result is committed."""
    made = f"{table(results('frameworks'))}\n" if list(RESULTS.glob("frameworks-*.json")) else ""
    return _MARKS.sub(lambda match: f"{match[1]}{made}{match[2]}", text)


if __name__ == "__main__":
    write_atomic(PAGE, with_table(PAGE.read_text()).encode())

"""Makes the picture of docs/results/parity.md: `python -m benchmarks.parity.page [--check]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.charts import Interval, intervals
from benchmarks.claims_page import DOCS, stale
from benchmarks.parity.conditions import CONDITIONS
from benchmarks.tables import results
from memfit.ir.codec import write_atomic

VERDICT_COLOURS = {"equivalent": "#15803d", "undecided": "#94a3b8", "refuted": "#c2410c"}


def verdicts_chart(result: dict[str, Any]) -> str:
    """Return the chart of differences to plain training, in margins."""
    verdicts = [case for case in result["cases"] if case["kind"] == "verdict"]
    conditions = list(dict.fromkeys(case["condition"] for case in verdicts))
    found = {(case["training"], case["condition"]): case for case in verdicts}
    columns = {
        training: [
            Interval(
                case["mean"] / case["margin"], case["half_width"] / case["margin"], VERDICT_COLOURS[case["verdict"]]
            )
            for case in (found[training, condition] for condition in conditions)
        ]
        for training in dict.fromkeys(case["training"] for case in verdicts)
    }
    return intervals(
        "What each lever does to what is learnt",
        f"Held-out metric under a lever less that of plain training, paired over {result['summary']['seeds']} seeds;"
        " intervals of 90 % confidence",
        [CONDITIONS[condition].title for condition in conditions],
        columns,
        list(VERDICT_COLOURS.items()),
        "difference, in margins of the training: right is better than plain, dashed lines are the margin",
    )


def files(result: dict[str, Any]) -> dict[Path, str]:
    """Return the charts."""
    return {DOCS / "figures" / "parity.svg": verdicts_chart(result)}


def main() -> None:
    """Write the charts, or check that they are those of the result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a chart has other figures")
    made = files(results("parity"))
    if parser.parse_args().check:
        found = stale(made)
        sys.exit(f"other than benchmarks/results: {', '.join(found)}; run benchmarks.parity.page" if found else 0)
    for path, text in made.items():
        write_atomic(path, text.encode())


if __name__ == "__main__":
    main()

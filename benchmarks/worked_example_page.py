"""Draws the docs' example from its newest committed result: `python -m benchmarks.worked_example_page [--check]`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from benchmarks.charts import COLOURS, Axis, Line, Panel, Stack, chart, stacks
from benchmarks.common import Case
from benchmarks.frontier.page import pareto
from benchmarks.pages import DOCS, main
from memfit.foundations import format_bytes

MIB = 2**20
CATEGORIES = ("parameters", "optimizer state", "inputs", "gradients", "activations", "temporaries", "workspaces")
"""From the ground up: what stays first."""


def memory_chart(result: dict[str, Any]) -> str:
    """Return the bytes alive over the plain and the planned step."""
    budget = result["summary"]["budget_bytes"]
    panels = [_stack(case) for case in result["cases"]]
    return stacks(
        "Memory over one step",
        "MiB by category, predicted; the planned step recomputes freed activations",
        panels,
        (0, 25, 50, 75, 100, 125, 150),
        (budget / MIB, f"budget: {format_bytes(budget)}"),
        "predicted time",
    )


def _stack(case: Case) -> Stack:
    ends = list(itertools.accumulate(case["seconds"]))
    live = {
        name: [value / MIB for value in case["live_bytes"][name]] for name in CATEGORIES if name in case["live_bytes"]
    }
    seen: dict[str, float] = {}
    for index, phase in case["phases"]:
        if phase in ("forward", "backward"):
            seen.setdefault(phase, ends[index - 1] if index else 0.0)
    return Stack(
        f"{case['step']}: peak {format_bytes(case['peak_bytes'])}", live, ends, [(w, p) for p, w in seen.items()]
    )


def frontier_chart(result: dict[str, Any]) -> str:
    """Return the step time over the peak, for the plans of the frontier."""
    points = pareto([(p["peak_bytes"] / MIB, p["step_seconds"] * 1e3) for p in result["summary"]["frontier"]])
    return chart(
        "The frontier",
        'Predicted, numerics="exact": a larger budget buys a faster step',
        [Panel("", [Line("plans", points, COLOURS[0])])],
        Axis("peak, MiB", (70, 80, 90, 100, 110, 120, 130, 140), lambda value: f"{value:.0f}"),
        Axis("ms", (290, 300, 310, 320, 330, 340, 350), lambda value: f"{value:.0f}"),
    )


def files(result: dict[str, Any]) -> dict[Path, str]:
    """Return the charts."""
    return {
        DOCS / "figures" / "example-memory.svg": memory_chart(result),
        DOCS / "figures" / "example-frontier.svg": frontier_chart(result),
    }


if __name__ == "__main__":
    main("benchmarks.worked_example_page", "worked_example", files, __doc__)

"""The figures of the second zoo: errors, refusals, budgets and bits, from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Case


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote.

    A workload is refused when any of its rows is; errors are over all rows that were measured, plain and planned, and
    the 95th percentile is the nearest rank.
    """
    measured = [case for case in cases if "measured_peak_bytes" in case]
    errors = sorted(abs(case["error"]) for case in measured)
    exact = [case for case in cases if case["kind"] == "exact" and "budget_bytes" in case]
    return {
        "steps": len({case["workload"] for case in cases}),
        "refused": len({case["workload"] for case in cases if "refused" in case}),
        "median_abs_error": statistics.median(errors) if errors else None,
        "p95_abs_error": errors[math.ceil(0.95 * len(errors)) - 1] if errors else None,
        "above_upper_end": sum(is_above_upper_end(case) for case in measured),
        "over_budget": sum(is_over_budget(case) for case in measured),
        "exact_plans": len(exact),
        "exact_bitwise": sum(case.get("bitwise", False) for case in exact),
    }


def is_above_upper_end(case: Case) -> bool:
    """Tell whether a row was measured above the upper end of its prediction."""
    return bool(case["measured_peak_bytes"] > case["peak_upper_bytes"])


def is_over_budget(case: Case) -> bool:
    """Tell whether a row was measured above its budget; a plain step has none."""
    return bool(case["measured_peak_bytes"] > case.get("budget_bytes", math.inf))


def line(case: Case) -> str:
    """Return a row as people read it."""
    start = f"{case['workload']:<24}{case['kind']:<10}{case.get('seconds', 0):6.1f} s"
    if "predicted_peak_bytes" not in case:
        return f"{start}  REFUSED {case['refused']}"
    told = f"{start}  predicted {case['predicted_peak_bytes'] / 2**20:7.1f} MiB"
    if "measured_peak_bytes" in case:
        told += f"  measured {case['measured_peak_bytes'] / 2**20:7.1f}  {case['error']:+.3%}"
        told += "  ABOVE THE UPPER END" if is_above_upper_end(case) else ""
        told += "  OVER BUDGET" if is_over_budget(case) else ""
    told += f"  NOT BITWISE: {case['difference']}" if case.get("bitwise") is False else ""
    return told + (f"  REFUSED {case['refused']}" if "refused" in case else "")

"""Predicted peaks against measured ones: plain and planned steps, over budgets down to the lowest that fits.

Truth is the peak that PyTorch's CPU allocator reported to the profiler over a whole run of two steps,
from the making of the model on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.common import Case, main, whole_run_peak_bytes
from examples import brain, byte_lm, digits_resnet, gpt2
from memfit import InfeasibleError, Workload, estimate, plan
from memfit.ir.plan import Levers, Numerics, Precision
from memfit.workload import batch_size_of

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "byte_lm": byte_lm.workload,
    "brain_segmentation": brain.workload,
    "gpt2": gpt2.workload,
    "digits_resnet": digits_resnet.workload,
}
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
NUMERICS: dict[Precision, tuple[Numerics, ...]] = {"32-true": ("exact", "reordered"), "bf16-mixed": ("reduced",)}


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each step that was predicted and measured, and what they add up to."""
    cases: list[Case] = []
    for name, make in WORKLOADS.items():
        for precision, classes in NUMERICS.items():
            cases.append(_report(plain_case(name, make(), precision)))
            for numerics in classes[-1:] if quick else classes:
                shares = (0.5,) if quick else SHARES
                cases += map(_report, planned_cases(name, make(), precision, numerics, cases, shares))
    planned = [case for case in cases if case["budget_bytes"] is not None]
    summary = {
        "cases": len(cases),
        "planned": len(planned),
        "largest_error": max(abs(case["error"]) for case in cases),
        "mean_error": sum(abs(case["error"]) for case in cases) / len(cases),
        "over_budget": sum(case["measured_peak_bytes"] > case["budget_bytes"] for case in planned),
    }
    return cases, summary


def plain_case(name: str, workload: Workload, precision: Precision) -> Case:
    """Return the plain step, predicted and measured."""
    predicted = estimate(workload, precision=precision)
    levers = Levers(precision=precision, microbatch_size=batch_size_of(workload.batch))
    return _case(name, precision, "plain", None, predicted.peak_bytes, whole_run_peak_bytes(workload, levers))


def planned_cases(
    name: str, workload: Workload, precision: Precision, numerics: Numerics, done: list[Case], shares: tuple[float, ...]
) -> list[Case]:
    """Return plans for shares of the plain peak, down to the lowest budget that memfit says fits."""
    plain_bytes = next(c["predicted_peak_bytes"] for c in reversed(done) if c["numerics"] == "plain")
    found: list[Case] = []
    for share in shares:
        try:
            found.append(planned_case(name, workload, precision, numerics, int(share * plain_bytes)))
        except InfeasibleError as e:
            lowest = e.lowest_peak_bytes
            break
    else:
        lowest = lowest_budget_bytes(workload, precision, numerics)
    return [*found, planned_case(name, workload, precision, numerics, lowest)]


def lowest_budget_bytes(workload: Workload, precision: Precision, numerics: Numerics) -> int:
    """Return the lowest budget that memfit says fits."""
    try:
        plan(workload, budget=1, numerics=numerics, precisions=[precision], points=1)
    except InfeasibleError as e:
        return e.lowest_peak_bytes
    raise AssertionError("a plan for one byte")


def planned_case(name: str, workload: Workload, precision: Precision, numerics: Numerics, budget_bytes: int) -> Case:
    """Return a plan for a budget, predicted and measured.

    Raises:
        InfeasibleError: No plan fits.
    """
    made = plan(workload, budget=budget_bytes, numerics=numerics, precisions=[precision], points=1)
    measured = whole_run_peak_bytes(workload, made.levers)
    return _case(name, precision, numerics, budget_bytes, made.predicted.peak_bytes, measured)


def _case(name: str, precision: str, numerics: str, budget: int | None, predicted: int, measured: int) -> Case:
    return {
        "workload": name,
        "precision": precision,
        "numerics": numerics,
        "budget_bytes": budget,
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured,
        "error": predicted / measured - 1,
    }


def _report(case: Case) -> Case:
    budget = "      plain" if case["budget_bytes"] is None else f"{case['budget_bytes'] / 2**20:7.1f} MiB"
    within = "" if case["measured_peak_bytes"] <= (case["budget_bytes"] or sys.maxsize) else "  OVER BUDGET"
    print(
        f"{case['workload']:<20}{case['precision']:<12}{case['numerics']:<11}budget {budget}"
        f"  predicted {case['predicted_peak_bytes'] / 2**20:7.1f}  measured {case['measured_peak_bytes'] / 2**20:7.1f}"
        f"  {case['error']:+.2%}{within}",
        file=sys.stderr,
        flush=True,
    )
    return case


if __name__ == "__main__":
    main("prediction", run, __doc__)

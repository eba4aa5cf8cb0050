"""Predicted peaks against measured ones, and against what others say: a zoo of steps, plain and planned.

Truth is the peak that PyTorch's CPU allocator reported to the profiler over a whole run of two steps,
from the making of the model on.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cases import NUMERICS
from benchmarks.common import Case, main
from benchmarks.on_accelerator import python
from benchmarks.processes import output_of
from memfit.errors import UsageError

QUICK = ("gpt2", "mobilenet", "monai_unet", "lstm", "vgg")
_TIMEOUT_SECONDS = 600
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "metavar": "NAME", "help": "some workloads"},
    "--device": {
        "default": "cpu",
        "help": "where the steps run: cpu, or cuda; write cuda's result elsewhere",
    },
}


def run(quick: bool, only: Sequence[str] | None = None, device: str = "cpu") -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each step of the zoo, in each precision, plain and planned, and what they add up to.

    Args:
        quick: A few workloads.
        only: The workloads of these names; None for all.
        device: Where they run: "cpu", or "cuda" for the GPU that is here.

    Raises:
        UsageError: The zoo has no workload of a name.
    """
    from benchmarks.zoo import ZOO

    unknown = set(only or ()) - ZOO.keys()
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: the zoo has {', '.join(ZOO)}")
    cases = [_report(case) for name in only or (QUICK if quick else ZOO) for case in _isolated(name, device)]
    return cases, summarised(cases)


def summarised(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    done = [case for case in cases if "measured_peak_bytes" in case]
    planned = [case for case in done if case["kind"] == "planned"]
    plain = [case for case in done if case["kind"] == "plain"]
    figures = accuracy([(c["predicted_peak_bytes"], c["peak_upper_bytes"], c["measured_peak_bytes"]) for c in done])
    if done:
        figures["underestimate_rate"] = sum(_held_bytes(c) > c["peak_upper_bytes"] for c in done) / len(done)
    for name in ("reserved_error", "step_error"):
        found = sorted(abs(c[name]) for c in done if name in c)
        if found:
            figures[f"median_abs_{name}"], figures[f"largest_abs_{name}"] = statistics.median(found), found[-1]
    return {
        **figures,
        "failed": len(cases) - len(done),
        "planned": len(planned),
        "over_budget": sum(_held_bytes(c) > c["budget_bytes"] for c in planned),
        "rivals": {name: _rival(name, plain) for name in (plain[0]["rivals"] if plain else ())},
    }


def _held_bytes(case: Case) -> int:
    """Return what is held against a budget and an upper end: reserved on a GPU, allocated elsewhere."""
    return int(case["measured_reserved_bytes" if "measured_reserved_bytes" in case else "measured_peak_bytes"])


def _rival(name: str, plain: Sequence[Case]) -> dict[str, Any]:
    """Return a rival's figures: it says nothing of planned steps, and states no interval."""
    told = [(c["rivals"][name], c["measured_peak_bytes"]) for c in plain if c["rivals"][name] is not None]
    figures = accuracy([(said, said, measured) for said, measured in told])
    return {**figures, "failed": len(plain) - len(told)}


def accuracy(found: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Return figures for (predicted, upper end, measured) bytes; the 95th percentile is the nearest rank."""
    if not found:
        return {"cases": 0}
    errors = sorted(abs(predicted / measured - 1) for predicted, _, measured in found)
    return {
        "cases": len(found),
        "median_abs_error": statistics.median(errors),
        "p95_abs_error": errors[math.ceil(0.95 * len(errors)) - 1],
        "largest_abs_error": errors[-1],
        "underestimate_rate": sum(measured > upper for _, upper, measured in found) / len(found),
    }


def _isolated(name: str, device: str) -> Iterator[Case]:
    """Yield the cases of a workload from a process of its own; those that it dies before are failures."""
    expected = [(precision, kind) for precision in NUMERICS for kind in ("plain", "planned")]
    command = [*python(device), "benchmarks.cases", name, "--device", device]
    output = output_of(command, _TIMEOUT_SECONDS)
    yield from output.rows
    if len(output.rows) < len(expected) or any("error_message" in row for row in output.rows):
        print(output.notices, file=sys.stderr)
    for precision, kind in expected[len(output.rows) :]:
        yield {"workload": name, "precision": precision, "kind": kind, "device": device, "error_message": output.end}


def _report(case: Case) -> Case:
    start = f"{case['workload']:<15}{case['precision']:<11}{case['kind']:<8}"
    if "error_message" in case:
        print(f"{start} FAILED {case['error_message']}", file=sys.stderr, flush=True)
        return case
    over = _held_bytes(case) > case.get("budget_bytes", sys.maxsize)
    low = _held_bytes(case) > case["peak_upper_bytes"]
    print(
        f"{start} predicted {case['predicted_peak_bytes'] / 2**20:7.1f} MiB"
        f"  measured {case['measured_peak_bytes'] / 2**20:7.1f}  {case['error']:+.3%}"
        f"{'  UNDERESTIMATED' if low else ''}{'  OVER BUDGET' if over else ''}",
        file=sys.stderr,
        flush=True,
    )
    return case


if __name__ == "__main__":
    main("prediction", run, __doc__, options=OPTIONS)

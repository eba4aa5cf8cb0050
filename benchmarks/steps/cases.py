"""The rows of one workload: `python -m benchmarks.steps.cases MODULE:TABLE NAME`, one JSON row for each line printed.

It runs by itself, so that one workload's failure or crash leaves the others alone.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.common import Case, whole_run_peak_bytes
from benchmarks.steps.data import seed_all
from benchmarks.steps.loop import SEED, STEPS, difference, plain_steps, trained_by_plan, trained_plainly
from memfit import InfeasibleError, Plan, Workload, estimate, plan
from memfit.hardware import allocated
from memfit.ir import Levers, Numerics, Prediction
from memfit.workload import samples_of

SHARES: dict[Numerics, float] = {"exact": 0.6, "reordered": 0.45}
"""For each class, the budget of its plan as a share of the plain step's measured peak; or else the lowest that fits."""
KINDS = ("plain", *SHARES)
Make = Callable[[], Workload]


def cases(make: Make) -> Iterator[Case]:
    """Yield the plain step of a workload, and its plans; what is refused has "refused", the reason."""
    plain = _attempt(plain_case, make)
    yield {"kind": "plain", **plain}
    for numerics, share in SHARES.items():
        if "loop_peak_bytes" not in plain:
            yield {"kind": numerics, "refused": "the plain step was refused"}
            continue
        budget = int(share * (plain.get("measured_peak_bytes") or plain["loop_peak_bytes"]))
        yield {"kind": numerics, **_attempt(planned_case, make, numerics, budget)}


def plain_case(row: Case, make: Make) -> None:
    """Fill in the plain step, predicted and measured, and what a loop written by hand takes."""
    row["loop_peak_bytes"] = loop_peak_bytes(make)
    workload = make()
    seed_all(SEED)
    started = time.perf_counter()
    _predicted(row, estimate(workload))
    row["estimate_seconds"] = time.perf_counter() - started
    _measured(row, workload, Levers(microbatch_size=samples_of(workload)))


def planned_case(row: Case, make: Make, numerics: Numerics, budget_bytes: int) -> None:
    """Fill in the plan for a budget, or for the lowest that fits: predicted, measured, and its bits if it is exact."""
    workload = make()
    seed_all(SEED)
    started = time.perf_counter()
    made = _planned(workload, numerics, budget_bytes)
    row["plan_seconds"] = time.perf_counter() - started
    row["budget_bytes"] = made.budget_bytes
    row["microbatches"] = -(-made.batch_size // made.levers.microbatch_size)
    row["regions"] = len(made.levers.regions)
    _predicted(row, made.predicted)
    _measured(row, workload, made.levers)
    if numerics == "exact":
        _bits(row, make, made)


def loop_peak_bytes(make: Make) -> int:
    """Return the peak that the allocator reported over two steps of the plain loop, the workload's making included."""
    with allocated() as meter:
        workload = make()
        gc.collect()
        seed_all(SEED)
        for _ in plain_steps(workload):
            pass
        del workload
    return meter.peak_bytes


def _planned(workload: Workload, numerics: Numerics, budget_bytes: int) -> Plan:
    def planned(budget: int) -> Plan:
        return plan(workload, budget=budget, numerics=numerics, precisions=["32-true"], points=1)

    try:
        return planned(budget_bytes)
    except InfeasibleError as e:
        return planned(e.lowest_peak_bytes)


def _predicted(row: Case, predicted: Prediction) -> None:
    row["predicted_peak_bytes"] = predicted.peak_bytes
    row["peak_upper_bytes"] = predicted.peak_upper_bytes
    row["where"] = predicted.where


def _measured(row: Case, workload: Workload, levers: Levers) -> None:
    seed_all(SEED)
    row["measured_peak_bytes"] = whole_run_peak_bytes(workload, levers, STEPS)
    row["error"] = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1


def _bits(row: Case, make: Make, made: Plan) -> None:
    """Hold a plan against the plain loop; where they differ, the plain loop against itself too."""
    row["bitwise"] = False
    plain = trained_plainly(make)
    found = difference(plain, trained_by_plan(make, made))
    row["bitwise"] = found is None
    if found is not None:
        row["difference"] = found
        row["plain_differs"] = difference(plain, trained_plainly(make))


def _attempt(fill: Callable[..., None], *arguments: object) -> Case:
    """Return a row as far as it could be filled."""
    row: Case = {}
    started = time.perf_counter()
    try:
        fill(row, *arguments)
    except Exception as e:  # a refusal is a row of the table
        traceback.print_exc()
        row["refused"] = f"{type(e).__name__}: {e}"
    return {**row, "seconds": time.perf_counter() - started}


def table_of(place: str) -> Mapping[str, Make]:
    """Return the table of workloads at "package.module:attribute"."""
    module, _, attribute = place.partition(":")
    table: Mapping[str, Make] = getattr(importlib.import_module(module), attribute)
    return table


def main() -> None:
    """Print the rows of a workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps.cases", description=__doc__)
    parser.add_argument("table", help="of workloads by name, such as benchmarks.steps.zoo:STEPS")
    parser.add_argument("name", help="of the workload")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # sums by scatter have no order of their own across threads
    rows = sys.stdout
    sys.stdout = sys.stderr  # libraries print notices
    for case in cases(table_of(arguments.table)[arguments.name]):
        print(json.dumps({"workload": arguments.name, **case}), file=rows, flush=True)


if __name__ == "__main__":
    main()

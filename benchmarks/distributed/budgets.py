"""Plans for ranks at many budgets: whether any rank of any step exceeds one, and whether "nothing fits" is true."""

from __future__ import annotations

import itertools
import multiprocessing as processes
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

import memfit
from benchmarks.common import Case
from benchmarks.distributed.models import BATCH, MODELS
from benchmarks.distributed.peaks import UNITS
from benchmarks.distributed.ranks import of_all_ranks, on_ranks
from memfit.errors import InfeasibleError
from memfit.hardware.cpu_allocations import allocated
from memfit.hardware.host import find_device
from memfit.ir import codec
from memfit.ir.plan import Levers, Plan
from memfit.ir.remat import Region
from memfit.levers.microbatches import microbatch_sizes
from memfit.levers.stack import applied
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import costs_of, predict
from memfit.sharding.one_rank import SEARCHED, proposals

BUDGETS, QUICK_BUDGETS = 13, 3
_STEPS = 3
_JUST_BELOW = 0.98  # of the lowest budget that memfit fits: nothing should


def planned(name: str, world_size: int, budget: int | str) -> Plan:
    """Return memfit's plan of a model in fp32."""
    return memfit.plan(MODELS[name](), budget=budget, world_size=world_size, precisions=["32-true"], points=1)


def budgets_of(name: str, world_size: int, count: int) -> tuple[list[int], int]:
    """Return budgets from the lowest that is feasible to what the fastest plan takes, and the lowest."""
    highest = planned(name, world_size, "90%").predicted.peak_upper_bytes
    try:
        lowest = planned(name, world_size, 1).predicted.peak_upper_bytes
    except InfeasibleError as e:
        lowest = e.lowest_peak_bytes
    return [int(budget) for budget in np.linspace(lowest, highest, count)], lowest


def plans_of(name: str, world_size: int, budgets: Sequence[int]) -> list[Plan]:
    """Return memfit's plan for each budget."""
    with _two_processes() as pool:
        return list(pool.map(planned, itertools.repeat(name), itertools.repeat(world_size), budgets))


def _two_processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, processes.get_context("spawn"), torch.set_num_threads, (1,))


def _as_rank(name: str, plans: list[bytes]) -> Iterator[list[list[int]]]:
    """Yield for each plan the peaks of its steps, by step and rank, the first step's included."""
    for data in plans:
        levers = codec.decode(data, Plan, source="the benchmark").levers
        yield [of_all_ranks(peak) for peak in peaks_of_steps(name, levers)]


def peaks_of_steps(name: str, levers: Levers) -> list[int]:
    """Return this rank's peak of each of some steps, the weights, the batch and what steps leave included."""
    peaks = []
    for last in range(1, _STEPS + 1):
        with allocated(but_in="before") as meter:
            with torch.profiler.record_function("before"):
                workload = MODELS[name]()
                stack = applied(levers, workload)
                step = stack.__enter__()
                for _ in range(last - 1):
                    step(workload.batch)
            step(workload.batch)
            stack.__exit__(None, None, None)
        peaks.append(meter.peak_bytes)
        del workload, stack, step
    return peaks


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each plan, and for each model and number of ranks one on what is infeasible."""
    torch.set_num_threads(1)
    for world_size in (2,) if quick else (2, 4):
        for name in ["transformer", "convolutions"] if quick else MODELS:
            budgets, lowest = budgets_of(name, world_size, QUICK_BUDGETS if quick else BUDGETS)
            plans = plans_of(name, world_size, budgets)
            found = on_ranks(world_size, _as_rank, name, [codec.encode(plan) for plan in plans])
            for budget, plan, peaks in zip(budgets, plans, found, strict=True):
                worst = max(max(step) for step in peaks)
                print(
                    f"{name:<13}{world_size} budget {budget:>10}  predicted {plan.predicted.peak_bytes:>10}"
                    f"  measured {worst:>10}{'  ABOVE' if worst > budget else ''}",
                    file=sys.stderr,
                    flush=True,
                )
                yield {
                    "part": "budgets",
                    "model": name,
                    "world_size": world_size,
                    "budget_bytes": budget,
                    "predicted_peak_bytes": plan.predicted.peak_bytes,
                    "peak_upper_bytes": plan.predicted.peak_upper_bytes,
                    "measured_peak_bytes": peaks,
                    "uses": [use.brief for use in plan.uses],
                }
            yield _infeasible(name, world_size, int(_JUST_BELOW * lowest))


def _infeasible(name: str, world_size: int, budget: int) -> Case:
    """Return whether memfit refuses a budget, and the least that brute force over shardings finds."""
    try:
        planned(name, world_size, budget)
        is_refused = False
    except InfeasibleError:
        is_refused = True
    return {
        "part": "infeasible",
        "model": name,
        "world_size": world_size,
        "budget_bytes": budget,
        "is_refused": is_refused,
        "brute_force_peak_upper_bytes": min(brute_force(name, world_size).values()),
    }


def brute_force(name: str, world_size: int) -> dict[Levers, int]:
    """Return the upper ends of the peaks of all shardings with all microbatch sizes, plain and recomputed."""
    tried = list(all_levers(world_size))
    with _two_processes() as pool:
        return dict(zip(tried, pool.map(_upper_bytes, itertools.repeat(name), tried), strict=True))


def _upper_bytes(name: str, levers: Levers) -> int:
    cpu = find_device("cpu")
    trace = capture_levers(MODELS[name](), levers, cpu)
    return predict(trace, costs_of([trace], cpu), cpu)[0].peak_upper_bytes


def all_levers(world_size: int) -> Iterator[Levers]:
    """Yield what brute force tries."""
    for proposed in proposals(world_size, SEARCHED, UNITS, ranks_per_node=8):
        for size in microbatch_sizes(BATCH // world_size):
            is_cut = size < BATCH // world_size
            for reduces in ("each", "last") if is_cut else ("each",):
                sharding = replace(proposed, reduces=reduces)
                for units in ((), UNITS):
                    regions = tuple(Region((unit,)) for unit in units)
                    yield Levers(microbatch_size=size, sharding=sharding, regions=regions)


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote."""
    plans = [row for row in rows if row["part"] == "budgets"]
    refused = [row for row in rows if row["part"] == "infeasible"]
    above = [row for row in plans if max(map(max, row["measured_peak_bytes"])) > row["budget_bytes"]]
    return {
        "plans": len(plans),
        "budget_violations": len(above),
        "wrongly_infeasible": sum(
            row["is_refused"] and row["brute_force_peak_upper_bytes"] <= row["budget_bytes"] for row in refused
        ),
    }

"""memfit's choice among shardings against brute force: everything that fits a budget is run, in turns."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Case
from benchmarks.distributed.budgets import brute_force, budgets_of, plans_of
from benchmarks.distributed.models import MODELS
from benchmarks.distributed.ranks import on_ranks
from memfit import ir
from memfit.ir import Levers
from memfit.levers import applied

RANKS = 4
NAMES = ("transformer", "frozen", "convolutions")
BUDGETS, QUICK_BUDGETS = 5, 2
ROUNDS, QUICK_ROUNDS = 12, 4
FINALISTS = 6
"""How many of the fastest run against memfit's choices again, for longer: the best of many noisy medians flatters."""


def _as_rank(name: str, choices: list[Levers], rounds: int) -> Iterator[list[float]]:
    """Yield the median seconds of a step of each choice, run in turns in an order drawn anew."""
    steps, stacks, batches = [], [], []
    for levers in choices:
        workload = MODELS[name]()
        stack = applied(levers, workload)
        steps.append(stack.__enter__())
        stacks.append(stack)
        batches.append(workload.batch)
    seconds: list[list[float]] = [[] for _ in choices]
    order = random.Random(0)  # the same on each rank
    for index in range(rounds + 2):
        for chosen in order.sample(range(len(choices)), len(choices)):
            dist.barrier()
            started = time.perf_counter()
            steps[chosen](batches[chosen])
            dist.barrier()
            if index >= 2:
                seconds[chosen].append(time.perf_counter() - started)
    yield [statistics.median(each) for each in seconds]
    for stack in stacks:
        stack.__exit__(None, None, None)


def measured(name: str, choices: Sequence[Levers], rounds: int) -> dict[Levers, float]:
    """Return the median seconds of a step by levers."""
    (seconds,) = on_ranks(RANKS, _as_rank, name, list(choices), rounds)
    return dict(zip(choices, seconds, strict=True))


def cases(quick: bool) -> Iterator[Case]:
    """Yield a row for each model and budget."""
    torch.set_num_threads(1)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for name in NAMES[:1] if quick else NAMES:
        budgets, _ = budgets_of(name, RANKS, QUICK_BUDGETS if quick else BUDGETS)
        chosen = dict(zip(budgets, plans_of(name, RANKS, budgets), strict=True))
        upper = brute_force(name, RANKS)
        ours = {budget: plan.levers for budget, plan in chosen.items()}
        first = measured(name, [*dict.fromkeys([*upper, *ours.values()])], rounds)
        finalists = dict.fromkeys(ours.values())
        for budget in budgets:
            fitting = [levers for levers in upper if upper[levers] <= budget]
            finalists |= dict.fromkeys(sorted(fitting, key=lambda levers: first[levers])[:FINALISTS])
        final = measured(name, list(finalists), 4 * rounds)
        for budget in budgets:
            seconds = {levers: final[levers] for levers in finalists if upper.get(levers, budget + 1) <= budget}
            best = min(seconds, key=lambda levers: seconds[levers], default=None)
            row = {
                "part": "choices",
                "model": name,
                "budget_bytes": budget,
                "tried": len(first),
                "memfit_seconds": final[ours[budget]],
                "predicted_seconds": chosen[budget].predicted.step_seconds,
                "memfit": [use.brief for use in chosen[budget].uses],
                "best_seconds": None if best is None else seconds[best],
                "best": None if best is None else json.loads(ir.codec.encode(best)),
                "ratio": None if best is None else final[ours[budget]] / seconds[best],
            }
            shown = "nothing else fits" if row["ratio"] is None else f"ratio {row['ratio']:.3f}"
            print(
                f"{name:<13}budget {budget:>10}  memfit {row['memfit_seconds']:.4f} s  {shown}",
                file=sys.stderr,
                flush=True,
            )
            yield row


def summarised(rows: list[Case]) -> dict[str, Any]:
    """Return the figures that the docs quote; where memfit alone fits, it is the best."""
    ratios = [row["ratio"] or 1.0 for row in rows if row["part"] == "choices"]
    return {
        "choice_within_5_percent": sum(ratio <= 1.05 for ratio in ratios) / len(ratios) if ratios else None,
        "choice_worst_ratio": max(ratios, default=None),
    }

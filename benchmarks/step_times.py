"""Are predicted ratios between plans right, and is the plan that is chosen by measuring the fastest?

Each model of the frontier is planned for budgets below its plain peak, by predicted times alone, and the plain and the
planned step run in turns, as a plan's own choice runs them: the predicted ratio of their times is held against the
measured one. Then a plan is chosen by measuring, and every plan that was run for it runs again, in turns: the one that
was chosen is held against the fastest.

Three conditions, each in processes of their own: one thread, two threads, and two threads beside two processes that
compute.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memfit
from benchmarks.common import Case, main
from benchmarks.frontier.models import QUICK, SUBJECTS
from benchmarks.processes import output_of
from benchmarks.steps.rows import Rows
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers, Plan
from memfit.planner.contenders import MARGIN
from memfit.planner.measured_steps import timed_in_turns
from memfit.workload import Workload, samples_of

SHARES = (0.7, 0.5)
_SPIN = "while True: sum(range(100000))"
_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Condition:
    """Under what steps are planned and run.

    Attributes:
        threads: Of PyTorch.
        others: Processes that compute beside them.
    """

    threads: int
    others: int = 0


CONDITIONS = {"quiet_1": Condition(1), "quiet_2": Condition(2), "busy_2": Condition(2, others=2)}


def cells(name: str, quick: bool) -> Iterator[Case]:
    """Yield the cells of a model, as this process runs it."""
    subject = (QUICK if quick else SUBJECTS)[name]
    workload = subject.make()
    for share in SHARES[1:] if quick else SHARES:
        yield from _cell(name, workload, share)


def _cell(name: str, workload: Workload, share: float) -> Iterator[Case]:
    options: dict[str, Any] = {"budget": f"{share}x", "precisions": ["32-true"], "points": 1}
    try:
        plan = memfit.plan(workload, measure=False, **options)
    except memfit.InfeasibleError:
        return
    plain = Levers(microbatch_size=samples_of(workload))
    found = _seconds(workload, [(plain, plan.plain.step_seconds), (plan.levers, plan.predicted.step_seconds)])
    if len(found) < 2:
        return
    yield {
        "kind": "ratio",
        "model": name,
        "budget": share,
        "levers": [use.brief for use in plan.uses],
        "predicted_ratio": plan.predicted.step_seconds / plan.plain.step_seconds,
        "measured_ratio": found[1] / found[0],
        "predicted_plain_seconds": plan.plain.step_seconds,
        "measured_plain_seconds": found[0],
    }
    yield from _choice(name, workload, share, memfit.plan(workload, measure=True, **options))


def _choice(name: str, workload: Workload, share: float, plan: Plan) -> Iterator[Case]:
    """Yield what the plan chosen by measuring took, and the fastest of those that were run for it, each run again."""
    run = {step.levers: step for step in plan.measured}
    if len(run) < 2 or plan.levers not in run:
        return
    levers = [plan.levers, *(other for other in run if other != plan.levers)]
    found = _seconds(workload, [(each, run[each].predicted_seconds) for each in levers])
    if len(found) < len(levers):
        return
    yield {
        "kind": "choice",
        "model": name,
        "budget": share,
        "plans": len(levers),
        "chosen_seconds": found[0],
        "best_seconds": min(found),
        "ratio_to_best": found[0] / min(found),
    }


def _seconds(workload: Workload, plans: Sequence[tuple[Levers, float]]) -> list[float]:
    """Return the median seconds of a step under each plan, run in turns; fewer where one failed."""
    timed = timed_in_turns(workload, plans, find_device("cpu"), limit_seconds=20.0)
    return [timed.medians[index] for index in range(len(plans)) if index in timed.medians]


@contextlib.contextmanager
def _computing(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have some processes compute, until the context is left."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary_of(rows: Sequence[Case]) -> dict[str, Any]:
    """Return the figures of a condition's cells."""
    ratios = [row for row in rows if row["kind"] == "ratio"]
    errors = [abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in ratios]
    choices = [row["ratio_to_best"] <= 1 + MARGIN for row in rows if row["kind"] == "choice"]
    return {
        "cells": len(errors),
        "ratio_median_abs_error": statistics.median(errors) if errors else None,
        "ratio_within_10_percent": statistics.fmean(e <= 0.1 for e in errors) if errors else None,
        "choices": len(choices),
        "measured_choice_within_2_percent": statistics.fmean(choices) if choices else None,
    }


def run(
    quick: bool,
    models: list[str] | None = None,
    conditions: list[str] | None = None,
    cell: str | None = None,
    rows: Path | None = None,
) -> tuple[list[Case], dict[str, Any]]:
    """Return the cells of every model under every condition, and their figures.

    Args:
        models: Those to run; None for all.
        conditions: Those to run under; None for all.
        cell: The one model that this process runs itself, and whose cells it prints.
        rows: A file with cells that were measured before; None for none.
    """
    if cell is not None:  # in a process of its own
        for row in cells(cell, quick):
            print(json.dumps(row), flush=True)
        sys.exit(0)
    before, cases = Rows(rows), list[Case]()
    for condition in conditions or list(CONDITIONS):
        for model in models or list(QUICK if quick else SUBJECTS):
            name = f"{model}, {condition}"
            found = before.of(name)
            if found is None:
                found = _isolated(model, CONDITIONS[condition], quick, name)
                before.add(name, found)
            cases += [{"condition": condition, **row} for row in found]
    summary = {
        condition: summary_of([case for case in cases if case["condition"] == condition])
        for condition in conditions or list(CONDITIONS)
    }
    return cases, summary


def _isolated(model: str, condition: Condition, quick: bool, name: str) -> list[Case]:
    """Return the cells of a model from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step_times", "--cell", model, *(["--quick"] * quick)]
    with _computing(condition.others):
        output = output_of(command, _LIMIT_SECONDS, {"OMP_NUM_THREADS": str(condition.threads)})
    if not output.rows:
        print(f"{name}: {output.end}\n{output.notices[-2000:]}", file=sys.stderr)
    return output.rows


if __name__ == "__main__":
    main(
        "step_times",
        run,
        __doc__,
        {
            "--models": {"nargs": "+", "choices": sorted(SUBJECTS), "help": "all by default"},
            "--conditions": {"nargs": "+", "choices": list(CONDITIONS), "help": "all by default"},
            "--rows": {
                "type": Path,
                "metavar": "FILE",
                "help": "go on with a run that was cut short: its rows are kept there",
            },
            "--cell": {"metavar": "MODEL", "help": "print the cells of one model, as this process runs it"},
        },
    )

"""Are predicted ratios between plans right, and is the plan that is chosen by measuring the fastest?

Each model of the frontier is planned for budgets below its plain peak, or for the lowest that fits, and a plan is
chosen by measuring. Then the plain step and every plan that was run for that choice run again, in turns, round by
round, those of which nothing more is to be known leaving. The predicted ratio of the plain step and of the plan that is
predicted to be fastest is held against the measured one, and the plan that was chosen against each of the others.

Three conditions, each in processes of their own, which keep freed memory and let threads wait as memfit's own do: one
thread, two threads, and two threads beside two processes that compute.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import memfit
from benchmarks.common import Case, main
from benchmarks.frontier.models import QUICK, SUBJECTS
from benchmarks.processes import output_of
from benchmarks.steps.rows import Rows
from memfit import hardware
from memfit.cost import Pace, Paced, at_rest, undisturbed_ratios
from memfit.hardware import find_device, free_bytes
from memfit.ir import Levers, MeasuredStep, Plan
from memfit.planner.measured_steps import timed_in_turns
from memfit.workload import Workload, samples_of

SHARES = (0.7, 0.5)
_SPIN = "while True: sum(range(100000))"
_LIMIT_SECONDS = 1800.0
_MOST_SECONDS, _LEAST_ROUNDS = 480.0, 5  # four minutes leave 3.5 % of noise beside other programs
_AS_FAST = 0.02  # a chosen plan may be slower than the fastest by this share
_SURE = 0.01  # the error with which a predicted ratio's measured one is known
_TOLD = 3.0  # how many errors a ratio is away from what it is held against, once that is told; asked in each round
_MOST_BYTES = 4 * 2**30  # no less than any of the steps takes


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
    hardware.heap.keep(_MOST_BYTES, free_bytes())  # before operators are timed
    workload = subject.make()
    for share in SHARES[1:] if quick else SHARES:
        budget = f"{share}x"
        try:
            plan = _planned(workload, budget)
        except memfit.InfeasibleError as e:  # one more plan, and none for what is lower
            yield from _cell(name, workload, "lowest", _planned(workload, e.lowest_peak_bytes))
            return
        yield from _cell(name, workload, budget, plan)


def _planned(workload: Workload, budget: int | str) -> Plan:
    return memfit.plan(workload, budget=budget, precisions=["32-true"], points=1, measure=True)


def _cell(name: str, workload: Workload, budget: str, plan: Plan) -> Iterator[Case]:
    run: dict[Levers, MeasuredStep | Plan] = {step.levers: step for step in plan.measured} or {plan.levers: plan}
    predicted_seconds = {levers: _predicted_seconds(step) for levers, step in run.items()}
    fastest = min(predicted_seconds, key=lambda levers: predicted_seconds[levers])
    plain = Levers(microbatch_size=samples_of(workload))
    cell = Cell(plain, fastest, plan.levers, tuple(run))
    rounds = _rounds(workload, {plain: plan.plain.step_seconds, **predicted_seconds}, cell.unknown)
    measured = ratios_of(rounds, fastest, plain)
    yield {
        "kind": "ratio",
        "model": name,
        "budget": budget,
        "levers": [use.brief for use in run[fastest].uses],
        "rounds": len(measured),
        "predicted_ratio": predicted_seconds[fastest] / plan.plain.step_seconds,
        "measured_ratio": statistics.median(measured),
        "ratio_error": error_of_median(measured),
        "predicted_plain_seconds": plan.plain.step_seconds,
        "measured_plain_seconds": statistics.median(_seconds_at_rest(rounds, plain)),
    }
    if len(run) > 1:
        found = {other: ratios_of(rounds, plan.levers, other) for other in run if other != plan.levers}
        best = max(found, key=lambda other: statistics.median(found[other]))
        to_best = found[best]
        yield {
            "kind": "choice",
            "model": name,
            "budget": budget,
            "plans": len(run),
            "chosen": [use.brief for use in plan.uses],
            "best_of_others": [use.brief for use in run[best].uses],
            "rounds": len(to_best),
            "ratio_to_best": max(1.0, statistics.median(to_best)),
            "ratio_error": error_of_median(to_best),
        }


def _predicted_seconds(step: MeasuredStep | Plan) -> float:
    return step.predicted.step_seconds if isinstance(step, Plan) else step.predicted_seconds


class Took(NamedTuple):
    """What a step takes in a turn, and the share of that in which its thread computed."""

    seconds: float
    attended_share: float = 1.0


Round = tuple[float, Mapping[Levers, Took]]
"""How slow the machine was, and the step under each plan that took part."""


@dataclass(frozen=True)
class Cell:
    """What is to be known of a budget's plans.

    Attributes:
        plain: The step as it is.
        fastest: The plan that is predicted to be fastest; its ratio to the plain step is held against the measured one.
        chosen: The plan that was chosen, which is held against each of the others.
        run: All plans that were run for the choice.
    """

    plain: Levers
    fastest: Levers
    chosen: Levers
    run: tuple[Levers, ...]

    def unknown(self, rounds: Sequence[Round]) -> set[Levers]:
        """Return the steps that are to be run on, of which some rounds don't tell enough."""
        if len(rounds) < _LEAST_ROUNDS:
            return {self.plain, *self.run}
        found = set[Levers]()
        if error_of_median(ratios_of(rounds, self.fastest, self.plain)) > _SURE:
            found |= {self.fastest, self.plain}
        others = [o for o in self.run if o != self.chosen and not is_told(ratios_of(rounds, self.chosen, o))]
        return found | {self.chosen, *others} if others else found


def _rounds(
    workload: Workload, plans: Mapping[Levers, float], unknown: Callable[[Sequence[Round]], set[Levers]]
) -> list[Round]:
    """Run plans in rounds, each in an order drawn anew, until all is known, or the time is over."""
    draws, pace = random.Random(0), Pace()
    found: list[Round] = []
    ends = time.perf_counter() + _MOST_SECONDS
    while (taking_part := unknown(found)) and time.perf_counter() < ends:
        took: dict[Levers, Took] = {}
        slowdowns = [pace.read()]
        order = [levers for levers in plans if levers in taking_part]
        for levers in draws.sample(order, len(order)):
            took[levers] = _timed(workload, levers, plans[levers])
            slowdowns.append(pace.read())
        found.append((max(slowdowns), took))
    return found


def _timed(workload: Workload, levers: Levers, about_seconds: float) -> Took:
    """Return the median of a turn's steps."""
    plans = [(levers, about_seconds)]
    timed = timed_in_turns(workload, plans, find_device("cpu"), limit_seconds=_LIMIT_SECONDS, rounds=1)
    if timed.errors or timed.are_first_steps:
        raise RuntimeError(f"a plan could not be run: {timed.errors}")
    return Took(timed.step_seconds[0], timed.turns[0][0].attended_share)


def ratios_of(rounds: Sequence[Round], levers: Levers, other: Levers) -> list[float]:
    """Return the ratios of two plans' times in the rounds that both took part in, since speeds come and go.

    As for a choice, of undisturbed times at the machine's own pace.
    """
    both = [(slowdown, took) for slowdown, took in rounds if levers in took and other in took]
    own, others = (
        [Paced(took[each].seconds, slowdown, took[each].attended_share) for slowdown, took in both]
        for each in (levers, other)
    )
    return undisturbed_ratios(own, others, _LEAST_ROUNDS)


def _seconds_at_rest(rounds: Sequence[Round], levers: Levers) -> list[float]:
    """Return a plan's times at the machine's own pace, or near the least slow one."""
    return at_rest([(slowdown, took[levers].seconds) for slowdown, took in rounds if levers in took], _LEAST_ROUNDS)


def is_told(ratios: Sequence[float]) -> bool:
    """Tell whether ratios say on which side of the bound the chosen plan is."""
    return abs(statistics.median(ratios) - (1 + _AS_FAST)) >= _TOLD * error_of_median(ratios)


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of the median of some values, by their quartiles, as of normal ones.

    By those, since times on a busy machine come in two kinds: most of them may be near the median, and it of one kind.
    """
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return math.sqrt(math.pi / 2) * (high - low) / (1.349 * math.sqrt(len(values)))


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
    choices = [row for row in rows if row["kind"] == "choice"]
    return {
        "cells": len(errors),
        "ratio_median_abs_error": statistics.median(errors) if errors else None,
        "ratio_within_10_percent": statistics.fmean(e <= 0.1 for e in errors) if errors else None,
        "choices": len(choices),
        "measured_choice_within_2_percent": _share(choices, lambda row: row["ratio_to_best"] <= 1 + _AS_FAST),
        "measured_choice_told_to_be_slower": _share(choices, _is_told_to_be_slower),
    }


def _share(rows: Sequence[Case], is_so: Callable[[Case], bool]) -> float | None:
    return statistics.fmean(map(is_so, rows)) if rows else None


def _is_told_to_be_slower(row: Case) -> bool:
    """Tell whether a chosen plan is slower than the fastest by more than is allowed, and by more than noise.

    Nothing is told by rows of earlier versions, which have no error.
    """
    error = row.get("ratio_error")
    return error is not None and bool(row["ratio_to_best"] - _TOLD * error > 1 + _AS_FAST)


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
    environment = {"OMP_NUM_THREADS": str(condition.threads)}
    if condition.others:  # as the command line has threads wait on a busy machine
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    with _computing(condition.others):
        output = output_of(command, _LIMIT_SECONDS, environment)
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

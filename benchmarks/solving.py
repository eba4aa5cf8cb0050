"""How long solving takes and how near to its bound it ends: the frontier's models, checkpointing alone, each budget,
and the lowest peak found.

Each model's plain step is captured and costed once. Then the fastest plan within each budget is solved for, by a new
solver that knows of no other budget. Seconds are the thread's own on the CPU, the making of the options and of the
linear model included, so that other programs on the machine play little part.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time
from typing import Any

import numpy as np

from benchmarks.common import Case, main
from benchmarks.frontier.cells import SHARES
from benchmarks.frontier.models import QUICK, SUBJECTS, Subject
from memfit.foundations import format_seconds
from memfit.hardware import find_device
from memfit.ir import Levers, Regions
from memfit.planner import capture_levers, costs_of
from memfit.solver import FINE, Problem, Solver, build, options
from memfit.workload import batch_size_of

TIME_LIMIT_SECONDS = 9.0


def run(quick: bool, models: Sequence[str] | None = None) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each model and budget that a plan fits, and the largest gap and time."""
    subjects = QUICK if quick else SUBJECTS
    cases = [case for name in models or subjects for case in solved(name, subjects[name])]
    gaps, seconds = [case["gap"] for case in cases], [case["solve_seconds"] for case in cases]
    return cases, {
        "cells": len(cases),
        "largest_gap": max(gaps),
        "median_gap": float(np.median(gaps)),
        "largest_solve_seconds": max(seconds),
        "median_solve_seconds": float(np.median(seconds)),
    }


def solved(name: str, subject: Subject) -> list[Case]:
    """Return a row for each budget of a model."""
    workload, device = subject.make(), find_device("cpu")
    trace = capture_levers(workload, Levers(microbatch_size=batch_size_of(workload.batch)), device)
    costs = costs_of([trace], device)
    started = thread_time()
    regions = Regions(trace)
    problem = build(regions, costs, options(regions, costs))
    made_seconds = thread_time() - started
    plain_bytes = problem.peak_bytes(np.zeros(len(problem.options), np.int64))
    lowest_bytes = Solver(problem).leanest().peak_bytes
    shares = [share for share in SHARES if share * plain_bytes > lowest_bytes] + [lowest_bytes / plain_bytes]
    return [_cell(name, problem, share, plain_bytes, made_seconds) for share in shares]


def _cell(name: str, problem: Problem, share: float, plain_bytes: int, made_seconds: float) -> Case:
    started = thread_time()
    choice = Solver(problem).fastest(round(share * plain_bytes), FINE, TIME_LIMIT_SECONDS)
    seconds = made_seconds + thread_time() - started
    assert choice is not None  # its lowest peak is no higher
    case = {
        "model": name,
        "share": share,
        "options": len(problem.options),
        "time_ratio": choice.seconds / problem.plain_seconds,
        "bound_ratio": choice.bound / problem.plain_seconds,
        "gap": 1 - choice.bound / choice.seconds,
        "solve_seconds": seconds,
    }
    print(
        f"{name:<9}{share:6.1%}  ×{case['time_ratio']:.4f}, at best ×{case['bound_ratio']:.4f}: gap {case['gap']:.2%},"
        f" in {format_seconds(seconds)}",
        flush=True,
    )
    return case


if __name__ == "__main__":
    main("solving", run, __doc__, options={"--models": {"nargs": "+", "choices": list(SUBJECTS)}})

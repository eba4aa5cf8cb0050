"""Does a training end the same under each lever, and what is the memory that a plan frees good for?

Five kinds of models learn from real data, plainly and under each lever, once for each seed. What they have learnt is
held against the plain run of the same seed by an equivalence test, with a margin that was said before. Then, in the
bytes of the plain training and in as many CPU seconds, memfit trains something larger.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Case, main
from benchmarks.parity import uses
from benchmarks.parity.conditions import CONDITIONS
from benchmarks.parity.equivalence import compare
from benchmarks.parity.figures import summary_of
from benchmarks.parity.half import slowdowns
from benchmarks.parity.runs import run as run_once
from benchmarks.parity.trainings import TRAININGS, Training
from benchmarks.steps.rows import Rows
from memfit import InfeasibleError, Plan

SEEDS, USE_SEEDS = 5, 3
QUICK = ("plain", "exact", "bf16-mixed")
QUICK_TRAININGS = ("text_classifier", "digits_resnet", "brain_segmentation", "video")
QUICK_STEPS = 12


def run(
    quick: bool,
    trainings: Sequence[str] | None = None,
    conditions: Sequence[str] | None = None,
    seeds: int | None = None,
    rows: Path | None = None,
) -> tuple[list[Case], dict[str, Any]]:
    """Return a row for each run, verdict and use, and the figures.

    Args:
        trainings: Those to run; None for all, or `QUICK_TRAININGS`.
        conditions: Those to run under, beside the plain one; None for all.
        seeds: Their number (> 1); None for `SEEDS`.
        rows: A file with rows that were measured before, which grows by each run; None for none.
    """
    torch.set_num_threads(1)
    before, cases = Rows(rows), list[Case]()
    names = list(trainings or (QUICK_TRAININGS if quick else TRAININGS))
    asked = conditions or (QUICK if quick else CONDITIONS)
    under = ["plain", *(condition for condition in asked if condition != "plain")]
    plans: dict[str, dict[str, Plan | None]] = {name: {} for name in names}
    for seed in range(seeds or (2 if quick else SEEDS)):
        for name in names:
            training = TRAININGS[name]
            training = dataclasses.replace(training, steps=QUICK_STEPS) if quick else training
            cases += [_run(name, training, condition, seed, plans[name], before) for condition in under]
    if not quick:
        cases += [_use(use, before) for use in uses.USES.values() if use.training in names]
        cases.append({"kind": "fp16 kernels", "slowdowns": slowdowns()})
    cases += [verdict for name in names for verdict in verdicts(name, cases)]
    return cases, summary_of(cases)


def _run(name: str, training: Training, condition: str, seed: int, plans: dict[str, Plan | None], before: Rows) -> Case:
    key = f"{name}, {condition}, {training.steps} steps, seed {seed}"
    found = before.of(key)
    if found is None:
        found = [{"kind": "run", "training": name, **run_once(training, condition, seed, plans)}]
        before.add(key, found)
        print(f"{key}: {found[0]['metric']:.4f}", file=sys.stderr, flush=True)
    return found[0]


def _use(use: uses.Use, before: Rows) -> Case:
    key = f"{use.training}, {use.title}"
    found = before.of(key)
    if found is None:
        found = [_measured(use)]
        before.add(key, found)
        print(f"{key}: {found[0].get('means')}", file=sys.stderr, flush=True)
    return found[0]


def _measured(use: uses.Use) -> Case:
    try:
        plan, plain_bytes, large_bytes = uses.plan_of(use)
    except InfeasibleError as e:
        return {"kind": "use", "training": use.training, "use": use.title, "pays": False, "infeasible": str(e)}
    rows = [row for seed in range(USE_SEEDS) for row in uses.run(use, seed, plan)]
    return uses.case_of(use, plan, plain_bytes, large_bytes, rows)


def verdicts(name: str, cases: Sequence[Case]) -> list[Case]:
    """Return for each condition of a training whether it ends as the plain one does."""
    training = TRAININGS[name]
    runs = [case for case in cases if case["kind"] == "run" and case["training"] == name]
    plain = {case["seed"]: case for case in runs if case["condition"] == "plain"}
    found = []
    for condition in dict.fromkeys(case["condition"] for case in runs if case["condition"] != "plain"):
        pairs = [(plain[case["seed"]], case) for case in runs if case["condition"] == condition]
        gains = [training.sign * (case["metric"] - before["metric"]) for before, case in pairs]
        said = compare(gains, training.margin)
        found.append(
            {
                "kind": "verdict",
                "training": name,
                "condition": condition,
                "margin": training.margin,
                **dataclasses.asdict(said),
                "seeds": len(pairs),
                "bitwise": sum(case["weights"] == before["weights"] for before, case in pairs),
            }
        )
    return found


if __name__ == "__main__":
    main(
        "parity",
        run,
        __doc__,
        {
            "--trainings": {"nargs": "+", "choices": list(TRAININGS), "help": "all by default"},
            "--conditions": {"nargs": "+", "choices": list(CONDITIONS), "help": "all by default"},
            "--seeds": {"type": int, "help": f"{SEEDS} by default"},
            "--rows": {
                "type": Path,
                "metavar": "FILE",
                "help": "go on with a run that was cut short: its rows are kept there",
            },
        },
    )

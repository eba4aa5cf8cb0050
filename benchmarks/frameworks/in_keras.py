"""A model in Keras under several ways to save memory: `python -m benchmarks.frameworks.in_keras SUBJECT STEPS OUT`.

The ways take turns, in one process: the plain step, Keras's mixed precision, `tf.recompute_grad` by hand, and
memfit's plans.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memfit.keras as mk
from benchmarks.frameworks.keras_models import transformer, unet
from benchmarks.frameworks.subject import SUBJECTS, UNetSizes, data
from memfit.errors import InfeasibleError

MIXED = "mixed_bfloat16"
TRACES = 3  # of which the largest peak counts: TensorFlow orders operators anew in each


def workload(name: str, by_hand: bool, policy: str) -> mk.Workload:
    """Return a subject's workload, with the same weights each time."""
    subject = SUBJECTS[name]
    given = data(subject)
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    if isinstance(subject.sizes, UNetSizes):
        x = np.moveaxis(given["x"], 1, -1)
        model = unet(subject.sizes, x.shape[1:], by_hand)
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        x = given["x"]
        model, loss = transformer(subject.sizes, x.shape[1:], by_hand), keras.losses.MeanSquaredError()
    batch = (tf.constant(x), tf.constant(given["y"]))
    return mk.Workload(model, batch, lambda model, batch: loss(batch[1], model(batch[0], training=True)), name=name)


def planned(mine: mk.Workload, budget_bytes: int) -> mk.Workload:
    """Return a workload under a plan, the leanest where none fits."""
    try:
        plan = mk.plan(mine, budget=budget_bytes, points=6, time_limit_seconds=3.0)
    except InfeasibleError as e:
        plan = mk.plan(mine, budget=int(1.1 * e.lowest_peak_bytes), points=6, time_limit_seconds=3.0)
    found = mk.Workload(mk.apply(plan, mine.model), mine.batch, mine.loss_fn, name=mine.name)
    PLANS[id(found)] = plan
    return found


PLANS: dict[int, Any] = {}


def main(name: str, steps: str, out: str) -> None:
    """Run the cases of one subject."""
    plain, mixed = workload(name, False, "float32"), workload(name, False, MIXED)
    by_hand, mixed_by_hand = workload(name, True, "float32"), workload(name, True, MIXED)
    budgets = {
        policy: int(SUBJECTS[name].share * max(mk.measured_peak(one.step(one.model)) for _ in range(TRACES)))
        for policy, one in (("float32", plain), (MIXED, mixed))
    }
    ways: dict[str, tuple[str, mk.Workload]] = {
        "plain": ("float32", plain),
        "tf.recompute_grad by hand": ("float32", by_hand),
        "planned": ("float32", planned(plain, budgets["float32"])),
        "mixed precision": (MIXED, mixed),
        "mixed precision, tf.recompute_grad by hand": (MIXED, mixed_by_hand),
        "mixed precision, planned": (MIXED, planned(mixed, budgets[MIXED])),
    }
    cases = []
    runs: list[tuple[dict[str, Any], Callable[[], Any]]] = []
    baselines: dict[str, list[Any]] = {}
    for way, (policy, mine) in ways.items():
        fresh = workload(name, "by hand" in way, policy)
        plan = PLANS.get(id(mine))
        model = fresh.model if plan is None else mk.apply(plan, fresh.model)
        run = fresh.step(model)
        loss, gradients = run()
        found = [g.numpy() for g in gradients]
        statistics_ = [v.numpy() for v in fresh.model.non_trainable_variables]
        baselines.setdefault(policy, [float(loss), found, statistics_])
        case: dict[str, Any] = {
            "model": name,
            "framework": "keras",
            "way": way,
            "budget_bytes": 0 if plan is None else plan.budget_bytes,
            "predicted_peak_bytes": None if plan is None else _predicted(plan),
            "predicted_extra_seconds": None if plan is None else plan.predicted.step_seconds - plan.plain.step_seconds,
            "own_peak_bytes": max(mk.measured_peak(fresh.step(model)) for _ in range(TRACES)),
            "loss": float(loss),
            "gradient_difference": _difference(baselines[policy][1], found),
            "statistics_difference": _difference(baselines[policy][2], statistics_),
        }
        cases.append(case)
        runs.append((case, run))
    seconds: dict[str, list[float]] = {case["way"]: [] for case in cases}
    for _ in range(int(steps)):
        for case, run in runs:
            started = time.process_time()
            run()
            seconds[case["way"]].append(time.process_time() - started)
    for case in cases:
        case["step_seconds"] = statistics.median(seconds[case["way"]])
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__}
    Path(out).write_text(json.dumps({"cases": cases, "versions": versions}))


def _predicted(plan: Any) -> int:
    """Return the peak that the layers predicted, which the plan's own figure is not: that was measured."""
    return int(next(c.peak_bytes for c in plan.frontier if c.levers == plan.levers))


def _difference(one: list[Any], other: list[Any]) -> float:
    """Return the largest difference of arrays, relative to the largest value of each.

    A bias before a BatchNormalization has no gradient but rounding: there is none here.
    """
    pairs = zip(one, other, strict=True)
    return max((float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-30)) for a, b in pairs), default=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])

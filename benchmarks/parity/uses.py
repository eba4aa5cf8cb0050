"""What memory is good for: in the bytes of a plain training, memfit trains something larger for as many seconds."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import memfit
from benchmarks.common import Case
from benchmarks.parity import trainings
from benchmarks.parity.conditions import describe, step_of
from benchmarks.parity.text import text_classifier
from benchmarks.parity.trainings import TRAININGS, endless
from examples.language_model import __main__ as language_model
from memfit import Plan, Workload
from memfit.capture import measure_peak_bytes
from memfit.recipes import even_windows, python_source
from memfit.structure.proposal import evaluated

SECONDS = 5.0
"""CPU seconds of steps, of every run."""

_FINAL_RATE = 0.1


@dataclass(frozen=True)
class Use:
    """Something larger than the plain training.

    Attributes:
        make: `make(seed)` returns its workload; `plain(seed)` the plain one, evaluated on the same data.
    """

    training: str
    title: str
    make: Callable[[int], Workload]
    plain: Callable[[int], Workload]


def _same_windows(make: Callable[[int], Workload], length: int) -> Callable[[int], Workload]:
    """Return language models that are evaluated on the same windows, in pieces of what they read at a time."""

    def made(seed: int) -> Workload:
        workload = make(seed)
        windows = even_windows(python_source("validation"), 64, length)
        context = workload.batch["tokens"].shape[1]
        return dataclasses.replace(
            workload, evaluate=partial(language_model.evaluate, windows=windows, context=context)
        )

    return made


def _text(seed: int, **sizes: Any) -> Workload:
    return text_classifier(seed=seed, **sizes)


USES = {
    use.title: use
    for use in (
        Use(
            "byte_lm",
            "context 192 in place of 64",
            _same_windows(partial(trainings.language_model, context=192), 192),
            _same_windows(trainings.language_model, 192),
        ),
        Use(
            "byte_lm",
            "width 128 in place of 64",
            partial(trainings.language_model, d_model=128),
            trainings.language_model,
        ),
        Use("text_classifier", "texts of 1,024 bytes in place of 256", partial(_text, length=1024), _text),
        Use("text_classifier", "batch of 128 in place of 32", partial(_text, batch_size=128), _text),
        Use("digits_resnet", "images of 10×10 in place of 8×8", partial(trainings.digits, size=10), trainings.digits),
        Use(
            "digits_resnet", "batch of 160 in place of 128", partial(trainings.digits, batch_size=160), trainings.digits
        ),
        Use(
            "brain_segmentation",
            "patches of 20³ in place of 16³",
            partial(trainings.brain, patch=(20, 20, 20)),
            trainings.brain,
        ),
        Use(
            "brain_segmentation",
            "channels 16, 32, 64 in place of 8, 16, 32",
            partial(trainings.brain, channels=(16, 32, 64)),
            trainings.brain,
        ),
        Use("video", "12 frames in place of 6", partial(trainings.clips, frames=12), trainings.clips),
        Use("video", "frames of 24×24 in place of 16×16", partial(trainings.clips, size=24), trainings.clips),
    )
}


def plan_of(use: Use) -> tuple[Plan, int, int]:
    """Return the plan of what is larger for what the plain training takes, and both plain peaks."""
    plain = memfit.estimate(use.plain(0))
    plan = memfit.plan(
        use.make(0),
        budget=plain.peak_upper_bytes,
        numerics="reordered",
        precisions=["32-true"],
        points=1,
        measure=False,
    )
    return plan, plain.peak_bytes, plan.plain.peak_bytes


def run(use: Use, seed: int, plan: Plan, seconds: float = SECONDS) -> list[Case]:
    """Return both runs of a seed: the plain one, and what is larger under its plan."""
    metric = TRAININGS[use.training].metric
    rows = []
    for way, make, planned in (("plain", use.plain, None), ("planned", use.make, plan)):
        steps, value, peak_bytes = _timed(make(seed), planned, seconds, metric, seed)
        rows.append({"way": way, "seed": seed, "steps": steps, "metric": value, "peak_bytes": peak_bytes})
    return rows


def _timed(workload: Workload, plan: Plan | None, seconds: float, metric: str, seed: int) -> tuple[int, float, int]:
    """Train for some CPU seconds, in which the rate falls; return steps, the metric, and the peak of a step."""
    spent, steps = 0.0, 0
    scheduler = LambdaLR(workload.optimizer, lambda _: 1 - (1 - _FINAL_RATE) * min(1.0, spent / seconds))
    workload, batches = dataclasses.replace(workload, scheduler=scheduler), endless(workload)
    torch.manual_seed(seed)
    with step_of(plan, workload) as step:
        while spent < seconds:
            batch = next(batches)
            started = time.process_time()
            step(batch)
            spent += time.process_time() - started
            steps += 1
        value = evaluated(workload)[metric]
        return steps, value, measure_peak_bytes(step, workload.batch)


def case_of(use: Use, plan: Plan, plain_bytes: int, large_bytes: int, rows: list[Case]) -> Case:
    """Return the runs of a use in one row; `pays` where the planned runs are at least as good in the mean."""
    sign = TRAININGS[use.training].sign
    means = {way: statistics.fmean(r["metric"] for r in rows if r["way"] == way) for way in ("plain", "planned")}
    return {
        "kind": "use",
        "training": use.training,
        "use": use.title,
        "seconds": SECONDS,
        "budget_bytes": plan.budget_bytes,
        "plain_bytes": plain_bytes,
        "unplanned_bytes": large_bytes,
        "levers": describe(plan),
        "means": means,
        "pays": sign * (means["planned"] - means["plain"]) >= 0,
        "runs": rows,
    }

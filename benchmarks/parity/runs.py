"""One run: a training under a condition, from a seed, to its end."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from typing import Any

import torch

import memfit
from benchmarks.common import Case
from benchmarks.parity.conditions import CONDITIONS, describe, plan_of, step_of
from benchmarks.parity.half import HalfProducts
from benchmarks.parity.trainings import Training, endless
from memfit import Plan, Workload
from memfit.capture import measure_peak_bytes
from memfit.errors import NonFiniteError
from memfit.structure.proposal import evaluated

POINTS = 10
"""Of a curve of the training loss."""


def run(training: Training, condition: str, seed: int, plans: dict[str, Plan | None]) -> Case:
    """Return what came of a run.

    Args:
        plans: Those of the training's conditions that were made before; a plan is for any seed.
    """
    asked = CONDITIONS[condition]
    workload = asked.prepare(training.workload(seed))
    if condition not in plans:
        plans[condition] = plan_of(asked, workload)
    plan, half = plans[condition], HalfProducts() if condition.startswith("16-mixed") else None
    torch.manual_seed(seed)
    with step_of(plan, workload) as step:
        trained = train(training, workload, step, half)
        metrics = dict(evaluated(workload))
    row = {
        "condition": condition,
        "seed": seed,
        "metric": metrics[training.metric],
        **trained,
        "weights": digest(workload.model),
        "levers": describe(plan) if condition == "exact" else [],
        "peak_bytes": peak_bytes(training, condition, plan) if seed == 0 else None,
    }
    if half is not None and seed == 0:
        row["dtypes"] = {name: sorted(dtypes) for name, dtypes in sorted(half.seen.items())}
    return row


def train(training: Training, workload: Workload, step: memfit.Step, half: HalfProducts | None) -> dict[str, Any]:
    """Train a workload, and return its curve, its skipped updates, its loss scales and its CPU seconds."""
    losses, scales, seconds, halfway = list[float](), list[float](), 0.0, None
    batches, skips, stopped = endless(workload), 0, ""
    for index in range(training.steps):
        batch = next(batches)
        started = time.process_time()
        try:
            with contextlib.nullcontext() if half is None else half:
                result = step(batch)
        except NonFiniteError as e:
            stopped = str(e).partition("\n")[0]
            break
        seconds += time.process_time() - started
        losses.append(result.loss)
        scales.append(result.loss_scale)
        skips = result.skips
        if index + 1 == training.steps // 2:
            halfway = evaluated(workload)[training.metric]
    part = max(1, training.steps // POINTS)
    return {
        "halfway": halfway,
        "losses": [statistics.fmean(losses[i : i + part]) for i in range(0, len(losses), part)],
        "skips": skips,
        "first_scale": scales[0],
        "last_scale": scales[-1],
        "cpu_seconds": seconds,
        "stopped": stopped,
    }


def peak_bytes(training: Training, condition: str, plan: Plan | None) -> int:
    """Return the measured peak of a step after the first, on a workload of its own."""
    workload = CONDITIONS[condition].prepare(training.workload(0))
    with step_of(plan, workload) as step:
        step(workload.batch)
        return measure_peak_bytes(step, workload.batch)


def digest(model: torch.nn.Module) -> str:
    """Return a digest of every bit of a model's parameters and buffers."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

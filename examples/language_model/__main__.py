"""Train a byte-level language model in one budget, plain with a short context and planned with a long one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from benchmarks.common import Case, main
from examples.training import moments, plain_levers, plain_peak_bytes, train, used_levers
from memfit import Workload
from memfit.recipes import byte_lm, even_windows, python_source


@dataclasses.dataclass(frozen=True)
class Size:
    """What is trained: the model, the long context in bytes, the budget, steps of a long window each."""

    context: int = 8192
    d_model: int = 64
    n_layer: int = 4
    budget: str = "64MiB"
    steps: int = 60
    evaluations: int = 4
    validation_windows: int = 6


QUICK = Size(context=512, d_model=16, n_layer=2, budget="1.5MiB", steps=4, evaluations=2, validation_windows=2)


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for the plain step with the long context, which is not trained, and for each training."""
    size = QUICK if quick else Size()
    long = language_model(size, size.context)
    plan = memfit.plan(long, budget=size.budget, precisions=["32-true"], points=1)
    does_not_fit = _case("plain, long context", long, plan.plain.peak_bytes)
    does_not_fit["measured_peak_bytes"] = plain_peak_bytes(language_model(size, size.context))
    planned = _case("planned, long context", long, plan.predicted.peak_bytes)
    planned |= train(long, plan.levers, moments(size.steps, size.evaluations))
    planned["levers"] = used_levers(plan)
    short, peak_bytes = longest_that_fits(size, plan.budget_bytes)
    plain = _case("plain, short context", short, peak_bytes)
    steps = size.steps * size.context // plain["context"]  # as many bytes as the long one
    stops, seconds = moments(steps, size.evaluations), planned["cpu_seconds"]
    plain |= train(short, plain_levers(short), stops, at_least_seconds=seconds)
    return [does_not_fit, plain, planned], _summary(size, plan.budget_bytes, plain, planned)


def language_model(size: Size, context: int) -> Workload:
    """Return the recipe's workload: one window a step, no dropout (no byte is seen twice in so short a run)."""
    workload = byte_lm(
        n_layer=size.n_layer,
        d_model=size.d_model,
        n_head=2,
        context=context,
        batch_size=1,
        dropout=0.0,
        learning_rate=2e-3,
        n_validation_windows=1,
    )
    windows = even_windows(python_source("validation"), size.validation_windows, size.context)
    return dataclasses.replace(
        workload, name=f"byte_lm, {context} bytes", evaluate=partial(evaluate, windows=windows, context=context)
    )


def evaluate(model: nn.Module, *, windows: Mapping[str, Tensor], context: int) -> dict[str, float]:
    """Return bits per byte of windows, in all and in their first and last quarters.

    A model with a shorter context than the windows reads them in pieces of it, so that every model is held against
    the same bytes.
    """
    length = windows["tokens"].shape[1]
    pieces = ((t.reshape(-1, context).split(1)) for t in (windows["tokens"], windows["targets"]))
    nats = torch.cat([F.cross_entropy(model(x)[0], y[0], reduction="none") for x, y in zip(*pieces, strict=True)])
    bits = nats.reshape(-1, length) / math.log(2)
    quarter = length // 4
    return {
        "bits_per_byte": bits.mean().item(),
        "bits_per_byte_first_quarter": bits[:, :quarter].mean().item(),
        "bits_per_byte_last_quarter": bits[:, -quarter:].mean().item(),
    }


def longest_that_fits(size: Size, budget_bytes: int) -> tuple[Workload, int]:
    """Return the plain step with the longest context that fits, halved from the long one, and its predicted peak."""
    context = size.context
    while True:
        context //= 2
        workload = language_model(size, context)
        predicted = memfit.estimate(workload)
        if predicted.peak_upper_bytes <= budget_bytes:
            return workload, predicted.peak_bytes


def _case(name: str, workload: Workload, predicted_peak_bytes: int) -> Case:
    context = workload.batch["tokens"].shape[1]
    return {"training": name, "context": context, "predicted_peak_bytes": predicted_peak_bytes}


def _summary(size: Size, budget_bytes: int, plain: Case, planned: Case) -> dict[str, Any]:
    per_byte = {c["training"]: c["cpu_seconds"] / (c["steps"] * c["context"]) for c in (plain, planned)}
    return {
        **dataclasses.asdict(size),
        "budget_bytes": budget_bytes,
        "timing": "CPU seconds (time.process_time) of steps alone, one thread",
        "cpu_seconds_per_byte": per_byte,
        "bits_per_byte_equal_bytes": plain["curve"][size.evaluations - 1]["bits_per_byte"],
        "bits_per_byte_equal_seconds": plain["curve"][-1]["bits_per_byte"],
        "bits_per_byte_planned": planned["curve"][-1]["bits_per_byte"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main("language_model", run, __doc__, package="examples")

"""Train a digits ResNet, halve its multiply-adds in several ways, fine-tune, and measure each."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.common import Case, main, whole_run_peak_bytes
from examples import digits_resnet
from memfit import Workload, structure
from memfit.ir import Levers
from memfit.structure.proposal import MEASURED_STEPS, evaluated, measured, refresh_statistics
from memfit.workload import batch_size_of

EPOCHS, FINE_TUNE_EPOCHS, ROUNDS = 12, 8, 3
LEARNING_RATE, FINE_TUNE_RATE = 0.02, 0.01


def run(quick: bool) -> tuple[list[Case], dict[str, Any]]:
    """Return a case for each model, the original first."""
    epochs, more = (4, 2) if quick else (EPOCHS, FINE_TUNE_EPOCHS)
    original = digits_resnet.workload(size=16)  # half the size of the example's, to train in minutes
    train(original, epochs, LEARNING_RATE)
    kept = copy.deepcopy(original)
    proposals = {
        "separable convolutions": structure.separable_convolutions(kept, multiply_adds=0.5, by="bytes"),
        "pruned": structure.prune(kept, multiply_adds=0.5),
        "pruned in rounds": structure.prune(
            kept, multiply_adds=0.5, rounds=ROUNDS, fine_tune=lambda smaller: train(smaller, 1, FINE_TUNE_RATE)
        ),
    }
    rows: dict[str, tuple[Workload, float | None, float | None]] = {"original": (original, None, None)}
    for name, proposal in proposals.items():
        rows[name] = (proposal.workload, evaluated(proposal.workload)["accuracy"], random_accuracy(proposal.workload))
        train(proposal.workload, more, FINE_TUNE_RATE)
    pruned = structure.prune(kept, multiply_adds=0.5).workload
    distilled = structure.distill(pruned, kept.model)
    train(distilled, more, FINE_TUNE_RATE)
    rows["pruned, distilled"] = (structure.student(distilled, pruned), rows["pruned"][1], rows["pruned"][2])
    train(original, more, FINE_TUNE_RATE)  # as long as the others
    cases = [_case(name, *row) for name, row in rows.items()]
    for case, (_, seconds) in zip(cases, measured([row[0] for row in rows.values()]), strict=True):
        case["step_seconds"] = seconds
    return cases, _summary(cases, epochs, more, kept)


def train(workload: Workload, epochs: int, learning_rate: float) -> None:
    """Train in place, by a plan made for this very model, with a rate that falls to nothing along a cosine."""
    batches = list(workload.batches or ())
    optimizer = workload.optimizer
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    workload = dataclasses.replace(workload, scheduler=schedule)
    plan = memfit.plan(workload, budget="90%", numerics="exact", precisions=["32-true"], points=1, time_limit_seconds=1)
    torch.manual_seed(0)
    with memfit.apply(plan, workload) as step:
        for _ in range(epochs):
            for batch in workload.batches or ():
                loss = step(batch).loss
    print(f"{workload.name}: {epochs} epochs, loss {loss:.3f}, {evaluated(workload)}", file=sys.stderr, flush=True)


def random_accuracy(workload: Workload) -> float:
    """Return the accuracy at the start of a model of the same structure with random weights, statistics set as well."""
    found = []
    for seed in range(3):
        fresh = copy.deepcopy(workload)
        torch.manual_seed(seed)
        for module in fresh.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                module.reset_parameters()
        refresh_statistics(fresh)
        found.append(evaluated(fresh)["accuracy"])
    return statistics.mean(found)


def _case(name: str, workload: Workload, start: float | None, random: float | None) -> Case:
    price = structure.price(workload)
    return {
        "model": name,
        "parameters": price.parameters,
        "multiply_adds": price.multiply_adds,
        "predicted_peak_bytes": price.peak_bytes,
        "peak_upper_bytes": price.prediction.peak_upper_bytes,
        "measured_peak_bytes": whole_run_peak_bytes(workload, Levers(microbatch_size=batch_size_of(workload.batch))),
        "random_accuracy": random,
        "start_accuracy": start,
        "accuracy": price.metrics["accuracy"],
    }


def _summary(cases: list[Case], epochs: int, more: int, original: Workload) -> dict[str, Any]:
    plain = cases[0]
    return {
        "epochs": epochs,
        "fine_tune_epochs": more,
        "timed_steps": MEASURED_STEPS,
        "original_accuracy_before_fine_tuning": evaluated(original)["accuracy"],
        "largest_loss_of_accuracy": max(plain["accuracy"] - case["accuracy"] for case in cases[1:]),
        "largest_error_of_savings": max(_saving_error(plain, case) for case in cases[1:]),
    }


def _saving_error(plain: Case, case: Case) -> float:
    """Return how far the predicted saving of bytes is from the measured one."""
    predicted, real = (plain[key] - case[key] for key in ("predicted_peak_bytes", "measured_peak_bytes"))
    return abs(predicted / real - 1)


if __name__ == "__main__":
    main("compress", run, __doc__, package="examples")

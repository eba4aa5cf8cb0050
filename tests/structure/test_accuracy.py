"""Smaller models start from what the original has learnt, and are as good again after some training."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")
pytest.importorskip("torch_pruning")

from examples import digits_resnet
from memfit.structure import prune, separable_convolutions
from memfit.structure.proposal import evaluated, refresh_statistics
from memfit.training import Step, StepOptions
from memfit.workload import Workload


def train(workload: Workload, epochs: int, learning_rate: float) -> float:
    """Train in place with a rate that falls to nothing, and return the accuracy."""
    torch.manual_seed(0)
    for group in workload.optimizer.param_groups:
        group["lr"] = learning_rate
    batches: Any = workload.batches
    batches.generator.manual_seed(0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(workload.optimizer, epochs * len(batches))
    with Step(
        dataclasses.replace(workload, scheduler=scheduler), StepOptions(microbatch_size=len(workload.batch[0]))
    ) as step:
        for _ in range(epochs):
            for batch in batches:
                step(batch)
    return evaluated(workload)["accuracy"]


@cache
def trained() -> Workload:
    workload = digits_resnet.workload(size=8)
    train(workload, 8, 0.02)
    return workload


def random_accuracy(workload: Workload) -> float:
    fresh = copy.deepcopy(workload.model)
    for module in fresh.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    made = dataclasses.replace(workload, model=fresh)
    refresh_statistics(made)
    return evaluated(made)["accuracy"]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("lever", [separable_convolutions, prune])
def test_half_the_multiply_adds_are_within_a_point_after_fine_tuning(lever: Any) -> None:
    workload = trained()
    original = evaluated(workload)["accuracy"]
    found = lever(workload, multiply_adds=0.5)
    assert original > 0.95
    assert found.after.multiply_adds <= 0.5 * found.before.multiply_adds
    start, random = found.after.metrics["accuracy"], random_accuracy(found.workload)
    tuned = train(found.workload, 4, 0.01)
    assert start > random + 0.2
    assert tuned >= original - 0.01

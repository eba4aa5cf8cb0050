"""Smaller models start from what the original has learnt, and are as good again after some training."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("sklearn")
pytest.importorskip("torch_pruning")

from examples.digits_resnet import BATCH_SIZE, N_HELD_OUT, digits, loss, resnet
from memfit.structure import prune, separable_convolutions
from memfit.structure.proposal import evaluated, refresh_statistics
from memfit.train.step import Step
from memfit.workload import Workload


def small_digits() -> Workload:
    """The example's network on images of half the size."""
    torch.manual_seed(0)
    images, labels = digits()
    images = F.avg_pool2d(images, 2)
    held_out = images[:N_HELD_OUT], labels[:N_HELD_OUT]
    train_set = TensorDataset(images[N_HELD_OUT:], labels[N_HELD_OUT:])
    model = resnet()
    return Workload(
        model=model,
        batch=list(train_set[:BATCH_SIZE]),
        loss_fn=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        name="small digits",
        batches=DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True, generator=torch.Generator()),
        evaluate=lambda model: {"accuracy": (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()},
    )


def train(workload: Workload, epochs: int, learning_rate: float) -> float:
    """Train in place with a rate that falls to nothing, and return the accuracy."""
    torch.manual_seed(0)
    for group in workload.optimizer.param_groups:
        group["lr"] = learning_rate
    batches: Any = workload.batches
    batches.generator.manual_seed(0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(workload.optimizer, epochs * len(batches))
    with Step(dataclasses.replace(workload, scheduler=scheduler), microbatch_size=BATCH_SIZE) as step:
        for _ in range(epochs):
            for batch in batches:
                step(batch)
    return evaluated(workload)["accuracy"]


@cache
def trained() -> Workload:
    workload = small_digits()
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
@pytest.mark.parametrize(
    "lever", [lambda w: separable_convolutions(w, multiply_adds=0.5), lambda w: prune(w, multiply_adds=0.5)]
)
def test_half_the_multiply_adds_are_within_a_point_after_fine_tuning(lever: Any) -> None:
    workload = trained()
    original = evaluated(workload)["accuracy"]
    found = lever(workload)
    assert original > 0.95
    assert found.after.multiply_adds <= 0.5 * found.before.multiply_adds
    start, random = found.after.metrics["accuracy"], random_accuracy(found.workload)
    tuned = train(found.workload, 4, 0.01)
    print(f"original {original:.4f}, random {random:.4f}, start {start:.4f}, tuned {tuned:.4f}")
    assert start > random + 0.2
    assert tuned >= original - 0.01

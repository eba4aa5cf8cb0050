"""Accumulated gradients of the recipes are those of one large batch, also where microbatches differ in their counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.recipes import byte_lm
from memfit.training import Step, StepOptions
from memfit.workload import Workload, batch_size_of


def assert_equal_to_the_large_batch(workload: Workload) -> None:
    """Equal to the rounding of fp64, for microbatches of every size, unequal ones included."""
    value = workload.loss_fn(workload.model, workload.batch)
    whole = value[0] / value[1] if isinstance(value, tuple) else value
    named = dict(workload.model.named_parameters())
    expected = dict(zip(named, torch.autograd.grad(whole, list(named.values())), strict=True))
    for size in range(1, batch_size_of(workload.batch)):
        loss, gradients = Step(workload, StepOptions(microbatch_size=size)).gradients(workload.batch)
        assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)


def padded_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the tokens that are no padding, and their number."""
    targets = batch["targets"].flatten()
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), targets, reduction="sum", ignore_index=-1), (
        targets != -1
    ).sum()


def weighted_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over samples of each sample's mean."""
    logits = model(batch["tokens"]).transpose(1, 2)
    return F.cross_entropy(logits, batch["targets"], reduction="none").mean(1).mean()


@pytest.mark.parametrize("loss", ["the recipe's", "padded", "mean"])
def test_byte_lm(loss: str) -> None:
    workload = byte_lm(n_layer=2, d_model=16, n_head=2, context=12, batch_size=5, max_bytes=50_000, dropout=0.0)
    workload.model.double()
    if loss == "padded":
        targets = workload.batch["targets"].clone()
        for sample, length in enumerate([12, 1, 7, 0, 3]):
            targets[sample, length:] = -1
        batch = {**workload.batch, "targets": targets}
        workload = dataclasses.replace(workload, batch=batch, loss_fn=padded_loss)
    elif loss == "mean":
        workload = dataclasses.replace(workload, loss_fn=weighted_mean)
    assert_equal_to_the_large_batch(workload)


def test_brain_segmentation() -> None:
    pytest.importorskip("monai")
    pytest.importorskip("nilearn")
    from memfit.recipes import brain_segmentation

    workload = brain_segmentation(
        patch=(8, 8, 8), batch_size=3, channels=(4, 8), resolution=4, batches_per_epoch=2, dropout=0.0
    )
    workload.model.double()
    batch = {name: t.double() if t.is_floating_point() else t for name, t in workload.batch.items()}
    assert_equal_to_the_large_batch(dataclasses.replace(workload, batch=batch))

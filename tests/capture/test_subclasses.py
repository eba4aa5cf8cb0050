"""Batches of tensor subclasses: a step of them holds what views and writes in place make autograd hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture import real_copy
from memfit.ir import Levers, Region
from memfit.workload import Workload
from tests.capture.steps import squared
from tests.measuring import peaks


class Tagged(torch.Tensor):
    """A tensor whose functions return such tensors, as MONAI's `MetaTensor`."""

    @property
    def tag(self) -> Any:
        return vars(self).get("tag")


class Quiet(torch.Tensor):
    """A tensor whose functions return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def wrote_in_place() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(inplace=True)) for _ in range(3))
    return nn.Sequential(*layers, nn.Linear(64, 2))


def workload_of(kind: type) -> Workload:
    torch.manual_seed(0)
    model = wrote_in_place()
    return squared(model, torch.randn(512, 64).as_subclass(kind), loss_fn=lambda model, x: (model(x) ** 2).mean())


LEVERS = {
    "plain": Levers(microbatch_size=512),
    "microbatches": Levers(microbatch_size=128),
    "regions": Levers(microbatch_size=512, regions=(Region(("0",)), Region(("1.1", "1.2")))),
}


@pytest.mark.parametrize("name", LEVERS)
@pytest.mark.parametrize("kind", [Tagged, Quiet, torch.Tensor])
def test_the_predicted_peak_is_the_measured_one(kind: type, name: str) -> None:
    predicted, measured = peaks(workload_of(kind), LEVERS[name])
    assert predicted == measured


def test_a_subclass_takes_more_where_operators_write_in_place() -> None:
    tagged, quiet, plain = (peaks(workload_of(kind), LEVERS["plain"])[0] for kind in (Tagged, Quiet, torch.Tensor))
    assert tagged > quiet == plain


def test_copies_with_data_are_of_the_class_with_its_attributes_and_share_nothing() -> None:
    workload = workload_of(Tagged)
    vars(workload.batch)["tag"] = ["of the user"]
    copied = real_copy(workload)
    assert type(copied.batch) is Tagged and copied.batch.tag == ["of the user"]
    assert copied.batch.tag is not workload.batch.tag and not copied.batch.requires_grad
    assert copied.batch.data_ptr() != workload.batch.data_ptr() and torch.equal(copied.batch, workload.batch)
    asked = dataclasses.replace(workload, batch=workload.batch.detach().requires_grad_())
    assert real_copy(asked).batch.requires_grad and real_copy(asked).batch.is_leaf


def test_a_volume_of_monai_is_predicted() -> None:
    data = pytest.importorskip("monai.data")
    workload = workload_of(torch.Tensor)
    predicted, measured = peaks(dataclasses.replace(workload, batch=data.MetaTensor(workload.batch)), LEVERS["regions"])
    assert predicted == measured > peaks(workload, LEVERS["regions"])[0]

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("torch_pruning")

import memfit
from memfit.errors import MissingExtraError, WorkloadError
from memfit.structure import batch_norm_sparsity, prune
from memfit.training import Step, StepOptions
from memfit.workload import Workload, batch_size_of
from tests.models import LARGE, convnet, cross_entropy, tied, unet
from tests.structure.measuring import savings


def volume() -> Workload:
    """A 3-D network with a depthwise convolution and a concatenation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1, groups=8)
            self.c, self.head = nn.Conv3d(16, 12, 1), nn.Conv3d(12, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            out: torch.Tensor = self.head(self.c(torch.cat([y, self.b(y)], 1)).relu())
            return out

    model = Net()
    data = {"x": torch.randn(4, 1, 6, 6, 6), "y": torch.randint(0, 3, (4, 6, 6, 6))}
    return Workload(model, data, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), torch.optim.Adam(model.parameters()))


def on_meta() -> Workload:
    with torch.device("meta"):
        return convnet()


@pytest.mark.parametrize(
    "make, is_global, importance",
    [
        (convnet, False, "l1"),
        (convnet, True, "batch-norm"),
        pytest.param(unet, True, "l1", marks=pytest.mark.ci),
        pytest.param(volume, False, "l1", marks=pytest.mark.ci),
    ],
)
def test_state_goes_with_the_channels_that_are_left(make: Any, is_global: bool, importance: Any) -> None:
    workload = make()
    with Step(workload, StepOptions(microbatch_size=batch_size_of(workload.batch))) as step:
        step(workload.batch)
    for parameter, state in workload.optimizer.state.items():
        for value in state.values():
            if value.dim():
                value.copy_(parameter.detach() * 3)
    before = copy.deepcopy(workload.model.state_dict())
    found = prune(workload, multiply_adds=0.5, importance=importance, is_global=is_global)
    made = found.workload
    assert found.after.multiply_adds <= 0.5 * found.before.multiply_adds
    assert all(torch.equal(t, before[name]) for name, t in workload.model.state_dict().items())
    old = dict(workload.model.named_parameters())
    cut = 0
    for name, parameter in made.model.named_parameters():
        state, was = made.optimizer.state[parameter], workload.optimizer.state[old[name]]
        assert state.keys() == was.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, parameter.detach() * 3 if value.dim() else was[key], rtol=0, atol=0)
        cut += parameter.numel() < old[name].numel()
    assert cut >= 6 and not any("could not be pruned" in note for note in found.notes)
    assert [p for g in made.optimizer.param_groups for p in g["params"]] == list(made.model.parameters())
    x = made.batch["x"]
    assert made.model(x).shape == workload.model(x).shape and made.model.training
    with Step(made, StepOptions(microbatch_size=batch_size_of(made.batch))) as step:
        assert step(made.batch).loss > 0


@pytest.mark.ci
def test_channels_that_do_nothing_go_first_and_nothing_changes() -> None:
    workload = volume()
    model: Any = workload.model
    dead = torch.tensor([1, 4, 6, 9, 10, 11])
    with torch.no_grad():
        for tensor in (model.c.weight, model.c.bias):
            tensor[dead] = 0
        model.head.weight[:, dead] = 0
    found = prune(workload, multiply_adds=0.9, ignored=("a", "b"), is_global=True)
    made: Any = found.workload.model
    assert (made.a.out_channels, made.head.out_channels) == (8, 3) and made.c.out_channels < 12
    x = workload.batch["x"]
    torch.testing.assert_close(made(x), model(x))
    assert {change.module for change in found.changes} == {"c", "head"}


@pytest.mark.ci
def test_rounds_come_down_in_equal_factors_with_training_between() -> None:
    workload = convnet(channels=16)
    seen: list[int] = []

    def fine_tune(made: Workload) -> None:
        seen.append(made.model.get_submodule("stages.0.conv1").weight.numel())
        with Step(made, StepOptions(microbatch_size=4)) as step:
            step(made.batch)

    found = prune(workload, multiply_adds=0.25, rounds=3, fine_tune=fine_tune, round_to=2)
    assert len(seen) == 3 and seen == sorted(set(seen), reverse=True)
    assert found.after.multiply_adds <= 0.25 * found.before.multiply_adds
    sizes = {m.out_channels for m in found.workload.model.modules() if isinstance(m, nn.Conv2d)}
    assert all(size % 2 == 0 for size in sizes)
    assert len(found.workload.optimizer.state) == len(list(found.workload.model.parameters()))


@pytest.mark.ci
def test_channels_of_equal_importance_do_not_all_go_at_once() -> None:
    found = prune(convnet(), multiply_adds=0.5, importance="batch-norm", is_global=True)
    assert found.after.multiply_adds > 0.2 * found.before.multiply_adds


@pytest.mark.ci
def test_plan_is_made_anew_for_the_smaller_model_whose_frozen_parameters_stay_frozen() -> None:
    workload = convnet(channels=16, blocks=1)
    workload.model.stem[0].weight.requires_grad_(False)
    found = prune(workload, multiply_adds=0.5)
    assert [name for name, p in found.workload.model.named_parameters() if not p.requires_grad] == ["stem.0.weight"]
    assert found.workload.model.state_dict().keys() == workload.model.state_dict().keys()
    old = memfit.plan(workload, budget=found.before.peak_bytes * 2, points=1, precisions=["32-true"])
    with pytest.raises(memfit.PlanMismatchError):
        memfit.apply(old, found.workload)
    plan = memfit.plan(found.workload, budget=found.after.peak_bytes, points=1, precisions=["32-true"])
    with memfit.apply(plan, found.workload) as step:
        step(found.workload.batch)


@pytest.mark.parametrize("make, sizes", [(convnet, LARGE["convnet"]), (unet, LARGE["unet"])])
@pytest.mark.ci
def test_predicted_saving_is_the_measured_one(make: Any, sizes: Any) -> None:
    workload = make(**sizes)
    predicted, really = savings(workload, prune(workload, multiply_adds=0.5))
    assert really > 1e6
    assert predicted == pytest.approx(really, rel=0.05)


@pytest.mark.ci
def test_state_of_another_shape_starts_anew_and_is_told() -> None:
    workload = convnet()
    optimizer = torch.optim.Adafactor(workload.model.parameters())
    workload = dataclasses.replace(workload, optimizer=optimizer)
    with Step(workload, StepOptions(microbatch_size=4)) as step:
        step(workload.batch)
    found = prune(workload, multiply_adds=0.5)
    assert "could not be pruned" in found.notes[0]
    with Step(found.workload, StepOptions(microbatch_size=4)) as step:
        step(found.workload.batch)


@pytest.mark.parametrize("counted", [False, True])
def test_sparsity_adds_the_sign_of_each_scale_to_its_gradient(counted: bool) -> None:
    workload = convnet()
    if counted:
        workload = dataclasses.replace(workload, loss_fn=lambda m, b: (cross_entropy(m, b) * len(b["y"]), len(b["y"])))
    with torch.no_grad():
        workload.model.stem[1].weight[::2] *= -1
    gradients = []
    for w in (workload, batch_norm_sparsity(workload, strength=0.5)):
        with Step(w, StepOptions(microbatch_size=4)) as step:
            gradients.append(step.gradients(w.batch)[1])
    plain, sparse = gradients
    for name, module in workload.model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            difference = sparse[f"{name}.weight"] - plain[f"{name}.weight"]
            torch.testing.assert_close(difference, 0.5 * module.weight.detach().sign(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sparse["head.weight"], plain["head.weight"])


def test_sparsity_makes_scales_small() -> None:
    plain, sparse = convnet(), batch_norm_sparsity(convnet(), strength=0.5)
    for workload in (plain, sparse):
        with Step(workload, StepOptions(microbatch_size=4)) as step:
            for _ in range(20):
                step(workload.batch)
    sums = [float(w.model.stem[1].weight.detach().abs().sum()) for w in (plain, sparse)]
    assert sums[1] < 0.5 * sums[0]


@pytest.mark.parametrize(
    "make, arguments, words",
    [
        (convnet, {"multiply_adds": 1.0}, "multiply_adds=1.0"),
        (convnet, {"multiply_adds": 0.5, "importance": "l2"}, "importance='l2'"),
        (convnet, {"multiply_adds": 0.5, "rounds": 0}, "rounds=0"),
        (convnet, {"multiply_adds": 0.5, "ignored": ("none*",)}, "'none*'"),
        pytest.param(convnet, {"multiply_adds": 0.5, "ignored": ("*",)}, "be reached", marks=pytest.mark.ci),
        (unet, {"multiply_adds": 0.5, "importance": "batch-norm"}, "use 'l1'"),
        (tied, {"multiply_adds": 0.5}, "one parameter"),
        (on_meta, {"multiply_adds": 0.5}, "on meta"),
    ],
)
def test_wrong_use_is_named(make: Any, arguments: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        prune(make(), **arguments)


def test_sparsity_needs_scales() -> None:
    with pytest.raises(WorkloadError, match="needs BatchNorm"):
        batch_norm_sparsity(unet())
    with pytest.raises(WorkloadError, match="strength=0"):
        batch_norm_sparsity(convnet(), strength=0)


def test_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(MissingExtraError, match=r"memfit\[structure\]"):
        prune(convnet(), multiply_adds=0.5)

"""Copies of workloads under fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.capture import KnownValues, fake_copy, mode_of, real_copy, without_collector
from memfit.cost import calibrate
from memfit.errors import WorkloadError
from memfit.hardware import find_device
from memfit.ir import Levers, simulate
from memfit.planner import capture_levers
from memfit.workload import Workload, tensors_of
from tests.capture.steps import squared
from tests.models import captured, squared_error, tied, transformer

GPU = torch.device("cuda", 0)


def faked(workload: Workload, device: torch.device | None = None) -> Workload:
    return fake_copy(workload, KnownValues.of(mode_of(workload)), device)


def of(model: nn.Module, batch: Any = None, **options: Any) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return Workload(model, batch or (torch.ones(2, 4), torch.ones(2, 4)), squared_error, optimizer)


def storages(*tensors: torch.Tensor) -> list[int]:
    return [t.untyped_storage()._cdata for t in tensors]


@pytest.mark.parametrize("device", [None, GPU])
def test_everything_is_fake_where_it_is_wanted(device: torch.device | None) -> None:
    workload = transformer()
    copied = faked(workload, device)
    parameters = list(copied.model.parameters())
    held = [p for g in copied.optimizer.param_groups for p in g["params"]]
    assert [id(p) for p in held] == [id(p) for p in parameters]
    for fake, real in zip(parameters, workload.model.parameters(), strict=True):
        assert isinstance(fake, FakeTensor) and fake.device == (device or torch.device("cpu"))
        assert fake.shape == real.shape and fake.stride() == real.stride() and fake.requires_grad
    assert all(t.device == (device or torch.device("cpu")) for t in tensors_of(copied.batch))
    assert not isinstance(next(workload.model.parameters()), FakeTensor)


@pytest.mark.parametrize("copier", [faked, real_copy])
def test_tied_weights_stay_one(copier: Callable[[Workload], Workload]) -> None:
    model = copier(tied()).model
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


@pytest.mark.parametrize("copier", [faked, real_copy])
def test_views_of_one_storage_share_one(copier: Callable[[Workload], Workload]) -> None:
    both = torch.arange(32.0).view(4, 8)
    copied = copier(of(nn.Linear(4, 4), {"x": both[:, 4:], "y": both[:, :4]}))
    x, y = copied.batch["x"], copied.batch["y"]
    assert storages(x) == storages(y) != storages(both)
    assert x.untyped_storage().nbytes() == 128 and x.storage_offset() == 4 and x.stride() == (8, 1)
    assert isinstance(x, FakeTensor) or torch.equal(x, both[:, 4:])


def test_a_model_built_on_meta_takes_no_memory_and_stands_for_the_cpu() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
        x = torch.empty(2, 1 << 20)
    copied = faked(of(model, (x, x)))
    weight = copied.model.get_parameter("weight")
    assert weight.device.type == "cpu" and weight.untyped_storage().nbytes() == 4 << 40


def test_state_moves_and_step_counters_keep_their_values_on_the_cpu() -> None:
    workload = of(nn.Linear(4, 4), lr=torch.tensor(0.5))
    for _ in range(3):
        workload.optimizer.zero_grad()
        squared_error(workload.model, workload.batch).backward()
        workload.optimizer.step()
    copied = faked(workload, GPU)
    values = KnownValues.of(mode_of(copied))
    for state in copied.optimizer.state.values():
        assert state["exp_avg"].device == GPU
        with values.fake, values:
            assert state["step"].device.type == "cpu" and state["step"].item() == 3.0
    with values.fake, values:
        assert copied.optimizer.param_groups[0]["lr"].item() == 0.5


def test_scalars_of_the_model_and_the_batch_move_and_can_be_read() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.tensor(2.5))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    copied = faked(of(model, {"x": torch.ones(2, 4), "n": torch.tensor(7)}), GPU)
    scale, n = copied.model.get_buffer("scale"), copied.batch["n"]
    assert {t.device for t in (scale, n, copied.model.get_parameter("temperature"))} == {GPU}
    values = KnownValues.of(mode_of(copied))
    with values.fake, values:
        assert scale.item() == 2.5 and n.item() == 7 and (n + 1).item() == 8


def test_a_fake_workload_is_copied_with_its_mode_and_its_values() -> None:
    values = KnownValues.of(FakeTensorMode(allow_non_fake_inputs=True))
    with values.fake, values:
        workload = of(nn.Linear(4, 4), {"x": torch.ones(2, 4), "ids": torch.arange(2)})
    assert mode_of(workload) is values.fake
    ids = faked(workload, GPU).batch["ids"]
    with values.fake, values:
        assert ids.tolist() == [0, 1]


def test_what_can_not_be_copied_is_named() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies of me")

    with pytest.raises(WorkloadError, match=r"can't be copied \(TypeError: no copies of me\)"):
        faked(of(Stubborn(4, 4)))


def test_what_a_step_replaces_in_a_copy_waits_for_no_collection() -> None:
    with without_collector():
        layer = real_copy(of(nn.Linear(4, 4), {"x": torch.ones(2, 4)})).model
        held = weakref.ref(next(layer.parameters()).untyped_storage())
        del layer
        assert held() is None


# Modules that a step converts: their parameters, gradients, buffers and hooks

WIDTH = 64
CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to where it is": lambda module: module.to("cpu"),
    "to what it is": lambda module: module.float(),
    "there and back": lambda module: module.double().float(),
    "twice": lambda module: (module.to("cpu"), module.half(), module.float()),
}


class Moving(nn.Module):
    """Converts its experts before it calls them."""

    def __init__(self, convert: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.BatchNorm1d(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(3)
        )
        self.convert = convert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            self.convert(expert)
            x = x + expert(x)
        return x


def moving(name: str) -> Workload:
    torch.manual_seed(0)
    model = Moving(CONVERSIONS[name])
    return squared(model, torch.randn(32, WIDTH), torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_fake_step_is_the_real_one(name: str) -> None:
    before = nn.Module._apply
    found, expected = captured(moving(name)), captured(moving(name), real=True)
    assert nn.Module._apply is before
    assert [op.name for op in found.ops] == [op.name for op in expected.ops]
    assert simulate(found, calibrate([found])).peak_bytes == simulate(expected, calibrate([expected])).peak_bytes


@pytest.mark.parametrize("name", CONVERSIONS)
def test_hooks_stay_on_parameters_however_often_a_step_is_captured(name: str) -> None:
    mine = moving(name)
    levers = Levers(microbatch_size=32, update="in-backward")
    for _ in range(3):
        trace = capture_levers(mine, levers, find_device("cpu"))
        assert not any("with data" in note for note in trace.notes)
        updates = [op for op in trace.ops if op.phase == "backward" and op.name.startswith("aten.addcdiv_")]
        assert len(updates) == len(list(mine.model.parameters()))

"""Modules that a step converts are captured without data as with it: their parameters, gradients, buffers and hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memfit.cost import calibrate
from memfit.hardware import find_device
from memfit.ir import Levers, simulate
from memfit.planner import capture_levers
from memfit.workload import Workload
from tests.capture.steps import squared
from tests.models import captured

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


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    model = Moving(CONVERSIONS[name])
    return squared(model, torch.randn(32, WIDTH), torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_fake_step_is_the_real_one(name: str) -> None:
    found, expected = captured(workload(name)), captured(workload(name), real=True)
    assert [op.name for op in found.ops] == [op.name for op in expected.ops]
    assert simulate(found, calibrate([found])).peak_bytes == simulate(expected, calibrate([expected])).peak_bytes


@pytest.mark.parametrize("name", CONVERSIONS)
def test_hooks_stay_on_parameters_however_often_a_step_is_captured(name: str) -> None:
    mine = workload(name)
    levers = Levers(microbatch_size=32, optimizer="in-backward")
    for _ in range(3):
        trace = capture_levers(mine, levers, find_device("cpu"))
        assert not any("with data" in note for note in trace.notes)
        updates = [op for op in trace.ops if op.phase == "backward" and op.name.startswith("aten.addcdiv_")]
        assert len(updates) == len(list(mine.model.parameters()))


def test_the_method_is_put_back() -> None:
    before = nn.Module._apply
    captured(workload("to where it is"))
    assert nn.Module._apply is before

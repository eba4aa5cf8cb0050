"""What a step leaves in objects that refer to each other stays until Python's collector runs: the interval says so."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from benchmarks.common import whole_run_peak_bytes
from memfit.capture import external_tensors
from memfit.errors import CaptureError, InfeasibleError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import Captures, capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.capture.steps import squared
from tests.covering import some


class Node:
    """Has a tensor, and refers to itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.own = tensor, self


class Noted(nn.Module):
    """Leaves copies of what passes, in a cycle that autograd does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        Node(hidden.detach().clone())
        out: torch.Tensor = self.second(hidden)
        return out


class Hooked(Noted):
    """Leaves its activations in a closure that refers to itself, and so to autograd's graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()

        def again(steps: int) -> torch.Tensor:
            return again(steps - 1) if steps else hidden * 2

        out: torch.Tensor = self.second(again(1))
        return out


def workload(make: Callable[[], nn.Module]) -> Workload:
    torch.manual_seed(0)
    return squared(make(), torch.randn(512, 64))


@pytest.mark.parametrize("make", [Noted, Hooked])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_two_steps_that_nothing_collects_stay_in_the_interval(make: Callable[[], nn.Module], microbatches: int) -> None:
    step, levers = workload(make), Levers(microbatch_size=-(-512 // microbatches))
    device = find_device("cpu")
    trace = capture_levers(step, levers, device)
    predicted = predict(trace, costs_of([trace], device), device)[0]
    gc.collect()
    gc.disable()
    try:
        measured = whole_run_peak_bytes(step, levers, 2)
    finally:
        gc.enable()
        gc.collect()
    left = measured - predicted.peak_bytes
    assert left > 0.02 * measured  # or nothing was left, and this tests nothing
    assert measured <= predicted.peak_upper_bytes
    assert predicted.peak_upper_bytes - measured <= 0.01 * measured + left / microbatches
    assert any("until Python's garbage collector runs" in note for note in predicted.notes)


@pytest.mark.parametrize("make", some([Noted, Hooked], [Noted]))
def test_microbatches_that_leave_more_than_the_step_takes_are_left_out(make: Callable[[], nn.Module]) -> None:
    step = workload(make)
    step = dataclasses.replace(step, batch=torch.randn(8192, 64))
    with pytest.raises(CaptureError, match="8,192 microbatches .* larger microbatch_size="):
        capture_levers(step, Levers(microbatch_size=1), find_device("cpu"))
    with pytest.raises(InfeasibleError) as caught:
        memfit.plan(step, budget="0.1x", precisions=["32-true"], points=1)
    plan = memfit.plan(step, budget=caught.value.lowest_peak_bytes, precisions=["32-true"], points=1)
    assert plan.levers.microbatch_size > 1
    assert [note for note in plan.notes if "microbatch 1:" in note and "left out" in note], plan.notes


@pytest.mark.parametrize("make", [Noted, Hooked])
@pytest.mark.parametrize("size", [512, 128])
def test_searches_see_it_too(make: Callable[[], nn.Module], size: int) -> None:
    step, device, levers = workload(make), find_device("cpu"), Levers(microbatch_size=size)
    captures = Captures(step, device)
    assert captures(levers).slack == captures(levers).slack == capture_levers(step, levers, device).slack > 0


def test_a_step_that_leaves_nothing_has_no_note() -> None:
    class Plain(Noted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x).relu())
            return out

    predicted = memfit.estimate(workload(Plain))
    assert not any("collector" in note for note in predicted.notes)
    assert predicted.peak_upper_bytes <= 1.002 * predicted.peak_bytes


def test_a_walk_of_objects_holds_nothing_until_a_collection() -> None:
    model, held = nn.Linear(4, 4), torch.zeros(1)
    workload = squared(model, torch.randn(2, 4))
    object.__setattr__(model, "held", held)
    reference = weakref.ref(held)
    gc.disable()
    try:
        assert [id(tensor) for tensor in external_tensors(workload)] == [id(held)]
        del held, model.__dict__["held"]
        assert reference() is None
    finally:
        gc.enable()

"""Sizes of microbatches between captured ones, in worlds whose peaks and times grow evenly, and in a real plan."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.errors import CaptureError
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.levers import applied, microbatch_sizes
from memfit.planner import capture_levers
from memfit.planner.captured_steps import size_between
from memfit.workload import Workload
from tests.measuring import peaks
from tests.models import squared_error

SAMPLE_BYTES, FIXED_BYTES = 10, 100
SAMPLE_SECONDS, MICROBATCH_SECONDS = 1.0, 0.5


def count_of(batch_size: int, size: int) -> int:
    return -(-batch_size // size)


class World:
    """Steps of a batch whose peaks grow by the samples of a microbatch, and times by the number of microbatches."""

    def __init__(self, batch_size: int, doubtful_bytes: int = 0) -> None:
        self.batch_size, self.doubtful_bytes = batch_size, doubtful_bytes

    def predicted(self, levers: Levers) -> Any:
        return SimpleNamespace(
            peak_upper_bytes=self.peak(levers.microbatch_size) + self.doubtful_bytes,
            step_seconds=self.seconds(levers.microbatch_size),
        )

    def peak(self, size: int) -> int:
        return FIXED_BYTES + SAMPLE_BYTES * size

    def seconds(self, size: int) -> float:
        return SAMPLE_SECONDS * self.batch_size + MICROBATCH_SECONDS * count_of(self.batch_size, size)

    def between(self, sizes: list[int], budget_bytes: int, below_seconds: float = 1e9) -> int | None:
        found = size_between(
            [Levers(microbatch_size=size) for size in sizes],
            self.predicted,
            batch_size=self.batch_size,
            budget_bytes=budget_bytes,
            below_seconds=below_seconds,
        )
        return None if found is None else found.microbatch_size


@given(st.integers(2, 200), st.integers(0, 2200))
def test_it_is_the_one_of_the_fewest_microbatches_that_fit(batch_size: int, budget_bytes: int) -> None:
    world, sizes = World(batch_size), microbatch_sizes(batch_size)
    found = world.between(sizes, budget_bytes)
    fitting = [size for size in range(1, batch_size + 1) if world.peak(size) <= budget_bytes]
    fewest = min((count_of(batch_size, size) for size in fitting), default=0)
    if found is None:
        assert not fitting or fewest in {count_of(batch_size, size) for size in sizes}
    else:
        assert world.peak(found) <= budget_bytes and found not in sizes
        assert count_of(batch_size, found) == fewest
        assert found == count_of(batch_size, fewest)  # as equal as can be


SIZES = [32, 16, 8, 4, 1]


def test_nothing_is_captured_that_is_no_faster_than_the_best_plan() -> None:
    world = World(32)
    assert world.between(SIZES, world.peak(7)) == 7
    assert world.between(SIZES, world.peak(7), below_seconds=world.seconds(7) + 0.01) == 7
    assert world.between(SIZES, world.peak(7), below_seconds=world.seconds(7)) is None
    doubtful = World(32, doubtful_bytes=SAMPLE_BYTES)  # the upper end is what has to fit
    assert doubtful.between(SIZES, doubtful.peak(8)) == 7


def test_sizes_of_other_levers_are_no_neighbours() -> None:
    world, lean = World(32), ("*",)
    others = [Levers(microbatch_size=32, lean=lean), Levers(microbatch_size=8), Levers(microbatch_size=1, lean=lean)]
    found = size_between(
        others, world.predicted, batch_size=32, budget_bytes=world.peak(7), below_seconds=world.seconds(1)
    )
    assert found == Levers(microbatch_size=7, lean=lean)


@pytest.mark.ci
def test_a_plan_takes_one_where_the_captured_sizes_fit_badly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, (torch.randn(32, 512, 128), torch.zeros(32, 512, 1)), squared_error, optimizer)
    budget = memfit.estimate(workload, microbatch_size=7).peak_upper_bytes + 2**10
    options: dict[str, Any] = {"numerics": "reordered", "precisions": ["32-true"], "measure": False, "points": 2}
    plan = memfit.plan(workload, budget=budget, **options)
    assert plan.levers == Levers(microbatch_size=7) and plan.predicted.peak_upper_bytes <= budget
    others = [point for point in plan.frontier if point.levers.microbatch_size != 7 and point.held_bytes <= budget]
    assert others and all(point.step_seconds > plan.predicted.step_seconds for point in others)
    assert peaks(workload, plan.levers)[1] <= budget


SOME = {5, 6, 7, 8, 11, 12, 13, 24}


class Carrying(nn.Module):
    """A model that carries state from one call to the next, with a row for each sample: other batches don't fit it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lstm, self.head, self.kind = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 1), kind
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, state = self.lstm(x, self.state if self.kind == "recurrent" else None)
        if self.kind == "recurrent":
            self.state = tuple(each.detach() for each in state)
        elif self.kind == "sum":
            hidden = hidden + (0 if self.state is None else self.state)
            self.state = hidden.detach()
        made: torch.Tensor = self.head(hidden)
        return made


@pytest.mark.parametrize(("kind", "running"), [("recurrent", {6, 8, 12, 24}), ("sum", {6, 8, 12, 24}), ("none", SOME)])
def test_a_smaller_last_microbatch_is_one_that_the_model_takes(kind: str, running: set[int]) -> None:
    """Two equal microbatches stand for all in a trace: the smaller one runs beside it."""

    def made() -> Workload:
        torch.manual_seed(0)
        model = Carrying(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Workload(model, (torch.randn(24, 8, 16), torch.zeros(24, 8, 1)), squared_error, optimizer)

    def runs(size: int) -> bool:
        with contextlib.suppress(RuntimeError), applied(Levers(microbatch_size=size), made()) as step:
            step(step.workload.batch)
            return True
        return False

    def is_captured(size: int) -> bool:
        with contextlib.suppress(CaptureError):
            return bool(capture_levers(made(), Levers(microbatch_size=size), find_device("cpu")).ops)
        return False

    assert {size for size in SOME if is_captured(size)} == {size for size in SOME if runs(size)} == running

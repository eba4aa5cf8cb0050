"""Plans and predictions of steps that read values or draw: with data, for GPUs that are not here, within budgets."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from benchmarks.common import whole_run_peak_bytes
from benchmarks.steps.loop import difference, trained_by_plan, trained_plainly
from memfit import hardware
from memfit.ir import Trace
from memfit.planner import StepVariant, captured_through
from memfit.workload import Workload

Course = Callable[[nn.Module, Tensor], Tensor]
SAMPLES = 1024


class Blocks(nn.Module):
    def __init__(self, course: Course) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4))
        self.first = nn.Linear(32, 32)
        self.course = course

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.course(block, x)
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def workload(course: Course, *, device: str = "cpu", samples: int = SAMPLES) -> Workload:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with torch.device(device):
        model = Blocks(course)
    batch = {"x": torch.randn(samples, 32), "y": torch.randn(samples, 32)}
    return Workload(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


def reads(block: nn.Module, x: Tensor) -> Tensor:
    return x + block(x) if x.norm(dim=1).mean().item() > 1e-3 else x


def selects(block: nn.Module, x: Tensor) -> Tensor:
    chosen = (x[:, 0] > 0).nonzero()[:, 0]
    return x.index_add(0, chosen, block(x[chosen]))


def draws(block: nn.Module, x: Tensor) -> Tensor:
    return x + block(x) if random.random() < 0.7 else x


@pytest.mark.parametrize(
    "course", [pytest.param(reads, marks=pytest.mark.ci), selects, pytest.param(draws, marks=pytest.mark.ci)]
)
def test_an_exact_plan_keeps_its_budget_and_every_bit(course: Course) -> None:
    def make() -> Workload:
        return workload(course)

    plain = memfit.estimate(make())
    plan = memfit.plan(make(), budget=int(0.8 * plain.peak_upper_bytes), numerics="exact", points=1)
    assert plan.levers.regions or plan.levers.lean
    assert whole_run_peak_bytes(make(), plan.levers) <= plan.budget_bytes
    assert difference(trained_plainly(make), trained_by_plan(make, plan)) is None


@pytest.mark.ci
def test_a_plan_runs_the_step_with_data_once_for_each_microbatch_size() -> None:
    runs = []

    def noted(variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        runs.append(variant.data)
        return capture(variant)

    with captured_through(noted):
        memfit.plan(workload(reads, samples=4), budget="0.95x", precisions=["32-true"], points=1)
    assert {4, 2, 1} <= {levers.microbatch_size for levers in runs[0].readings}
    assert all(data is runs[0] for data in runs)  # which knows each once


@pytest.mark.skipif(hardware.shim.has_gpu(), reason="a GPU is here: nothing is sent")
def test_what_a_step_for_a_gpu_reads_is_read_of_the_data_here() -> None:
    def sometimes(block: nn.Module, x: Tensor) -> Tensor:
        return x if x.abs().max().item() > 0.5 else x + block(x)

    with_data = memfit.estimate(workload(sometimes), device="t4")
    without = memfit.estimate(workload(sometimes, device="meta"), device="t4")
    assert not [note for note in with_data.notes if "a guess" in note]
    assert any("a guess" in note for note in without.notes)
    assert with_data.peak_bytes < without.peak_bytes

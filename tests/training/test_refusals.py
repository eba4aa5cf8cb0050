"""Workloads that are refused by name, before minutes pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.errors import CaptureError, WorkloadError
from memfit.workload import Workload, fingerprint


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(nn.Linear(4, 4)))


class Wrapper:
    """As schedules wrap an optimizer, with a step and nothing else."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Alike(Wrapper):
    """As packages wrap an optimizer, with its groups and state."""

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


class TwoPasses(torch.optim.SGD):
    """Needs a closure, and says so when it is called."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "needs a closure"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def workload(model: nn.Module, optimizer: Any) -> Workload:
    return Workload(model, torch.ones(8, 4), lambda m, x: m(x).mean(), optimizer)


def linear(make: Callable[[nn.Module], Any]) -> Workload:
    model = nn.Linear(4, 4)
    return workload(model, make(model))


REFUSED: dict[str, tuple[Callable[[], Workload], str]] = {
    "scripted": (
        lambda: workload(scripted(), sgd(nn.Linear(1, 1))),
        r"model\.0 is a scripted module.*torch\.jit\.script",
    ),
    "lazy": (
        lambda: workload(nn.Sequential(nn.LazyLinear(3)), sgd(nn.Linear(1, 1))),
        r"model\.0 is a LazyLinear, .*\(weight, bias\): run one batch",
    ),
    "wrapped": (
        lambda: workload(nn.DataParallel(nn.Linear(4, 4)), sgd(nn.Linear(1, 1))),
        r"Workload\.model is a DataParallel.*Workload\.model\.module",
    ),
    "LBFGS": (lambda: linear(lbfgs), r"optimizer is LBFGS\. Its step\(closure\).*without a closure"),
    "LBFGS, wrapped": (lambda: linear(lambda m: Alike(lbfgs(m))), "optimizer is LBFGS"),
    "LBFGS, among several": (lambda: linear(lambda m: memfit.Optimizers([lbfgs(m)])), "optimizer is LBFGS"),
    "a wrapper": (lambda: linear(lambda m: Wrapper(sgd(m))), "is a Wrapper without param_groups, state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_run_is_refused_by_name(case: str) -> None:
    build, message = REFUSED[case]
    calls: list[Callable[[Workload], Any]] = [
        memfit.estimate,
        lambda w: memfit.plan(w, budget="1MiB"),
        lambda w: memfit.estimate(w, device="h200"),
    ]
    for call in calls:
        with pytest.raises(WorkloadError, match=message):
            call(build())


def test_a_plan_is_not_applied_to_an_optimizer_that_needs_a_closure() -> None:
    plan = memfit.plan(linear(sgd), budget="1MiB", points=1)
    other = linear(lbfgs)
    with pytest.raises(WorkloadError, match="optimizer is LBFGS"):
        memfit.apply(replace(plan, fingerprint=fingerprint(other)), other)


@pytest.mark.parametrize("make", [sgd, lambda m: Alike(torch.optim.Adam(m.parameters()))])
def test_closures_that_may_be_left_out_are_no_matter(make: Callable[[nn.Module], Any]) -> None:
    assert memfit.estimate(linear(make)).peak_bytes > 0


def test_a_closure_that_is_asked_for_late_is_explained() -> None:
    with pytest.raises(CaptureError, match="needs a closure.*give an optimizer that needs none"):
        memfit.estimate(linear(lambda m: TwoPasses(m.parameters(), lr=0.1)))

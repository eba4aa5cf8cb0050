"""The optimizer's fused step: the plain step's weights to rounding, without its temporaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import memfit
from memfit.capture import real_copy
from memfit.errors import InfeasibleError, PlanError
from memfit.ir import Levers
from memfit.levers import applied, check_combination
from memfit.workload import Workload
from tests.measuring import peaks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def wide(optimizer: str = "AdamW") -> Workload:
    """A few samples through large layers: the optimizer's step is the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return Workload(
        model=model,
        batch=torch.randn(4, 256),
        loss_fn=lambda model, batch: (model(batch) - batch).square().mean(),
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        name="wide",
    )


FUSED = Levers(microbatch_size=4, optimizer="fused")


def after(workload: Workload, *each: Levers) -> list[Tensor]:
    """Return weights and the optimizer's state after two steps under each of some levers."""
    copied = real_copy(workload)
    for levers in each:
        with applied(levers, copied) as step:
            for _ in range(2):
                step(copied.batch)
    parameters = list(copied.model.parameters())
    state = [v for p in parameters for v in copied.optimizer.state[p].values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*parameters, *state)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_state_are_the_plain_steps_to_rounding(optimizer: str) -> None:
    workload, plain = wide(optimizer), replace(FUSED, optimizer="as-is")
    expected = after(workload, plain, plain)
    for each in ((FUSED, FUSED), (plain, FUSED), (FUSED, plain)):  # state goes from one to the other
        for tensor, other in zip(after(workload, *each), expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-6)
    moved = [t + 1 for t in expected]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after(workload, FUSED, FUSED), moved, rtol=1e-4, atol=1e-6)


def test_the_users_settings_come_back() -> None:
    workload = wide("Adam, foreach")
    before = [dict(group, params=None) for group in workload.optimizer.param_groups]
    with applied(FUSED, workload) as step:
        step(workload.batch)
        assert all(group["fused"] for group in workload.optimizer.param_groups)
    assert [dict(group, params=None) for group in workload.optimizer.param_groups] == before


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_saving_is_predicted_to_the_byte(optimizer: str) -> None:
    workload = wide(optimizer)
    (plain, plain_measured), (fused, fused_measured) = (
        peaks(workload, replace(FUSED, optimizer="as-is")),
        peaks(workload, FUSED),
    )
    assert (plain, fused) == (plain_measured, fused_measured)
    assert plain - fused > 0.9 * 1024 * 256 * 4  # about a temporary of the largest parameter's size, at least


def test_a_plan_takes_it_where_nothing_else_fits() -> None:
    workload = wide()
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 1, "numerics": "reordered"}
    budget = memfit.estimate(workload).peak_bytes - 1024 * 256 * 4
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, optimizers=(), **options)
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, optimizers=["fused"], **(options | {"numerics": "exact"}))
    plan = memfit.plan(workload, budget=budget, optimizers=["fused"], **options)
    assert plan.levers.optimizer == "fused" and plan.classes == {"fused optimizer": "reordered"}
    found = memfit.verify(plan, workload, steps=0)
    assert found.holds and found.measured_peak_bytes <= budget, found.failures


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, differentiable=True),
    ],
)
def test_it_is_refused_where_there_is_none_to_switch_on(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    workload = wide()
    workload = dataclasses.replace(workload, optimizer=optimizer(workload.model.parameters()))
    with pytest.raises(PlanError, match="fused optimizer can't be combined with an optimizer without a fused step"):
        check_combination(FUSED, workload)

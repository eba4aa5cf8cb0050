from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.errors import NonFiniteError, WorkloadError
from memfit.training import LossScaler, Optimizers, Step, StepOptions
from memfit.workload import LossScaling, Workload
from tests.training.conftest import training_state


@settings(max_examples=100, deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5), power=st.integers(0, 20))
def test_the_scale_moves_as_that_of_grad_scaler(overflows: list[bool], interval: int, power: int) -> None:
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=interval)
    scaler = LossScaler(LossScaling(initial=2.0**power, growth_interval=interval, floor=2.0**-99, ceiling=2.0**99))
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflowed in overflows:
        parameter.grad = torch.full((1,), math.inf if overflowed else 1.0)
        oracle.scale(torch.zeros(()))
        oracle.unscale_(optimizer)
        oracle.update()
        scaler.update(overflowed=overflowed)
        assert scaler.scale == oracle.get_scale()
    assert scaler.skips == sum(overflows)


@settings(max_examples=50, deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=60))
def test_the_scale_stays_between_floor_and_ceiling_and_a_static_one_where_it_is(overflows: list[bool]) -> None:
    bounded = LossScaler(LossScaling(initial=8.0, growth_interval=1, floor=4.0, ceiling=16.0))
    static = LossScaler(LossScaling(initial=8.0, growth_interval=None))
    for overflowed in overflows:
        before = bounded.scale
        bounded.update(overflowed=overflowed)
        static.update(overflowed=overflowed)
        assert bounded.scale == (max(before / 2, 4.0) if overflowed else min(before * 2, 16.0))
        assert static.scale == 8.0
    assert bounded.skips == static.skips == sum(overflows)


@settings(max_examples=50, deadline=None)
@given(before=st.lists(st.booleans(), max_size=20), after=st.lists(st.booleans(), max_size=20))
def test_a_scaler_goes_on_from_its_state(before: list[bool], after: list[bool]) -> None:
    whole, resumed = (LossScaler(LossScaling(initial=256.0, growth_interval=3)) for _ in range(2))
    for overflowed in before:
        whole.update(overflowed=overflowed)
    resumed.load_state_dict(whole.state_dict())
    for overflowed in after:
        whole.update(overflowed=overflowed)
        resumed.update(overflowed=overflowed)
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0.5},
        {"initial": 2.0**30},
        {"growth_interval": 0},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"floor": 0.0},
        {"max_skips": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=rf"LossScaling\.{next(iter(wrong))}="):
        LossScaling(**wrong)


# In a step


class Half(nn.Module):
    """Multiplies by a weight in fp16, which overflows above 65504."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() * self.weight.half()).float()


def step_of(weights: list[float], *, samples: int = 4, microbatch_size: int | None = None, **scaling: Any) -> Step:
    """A chain of products in fp16 behind a BatchNorm, with two optimizers and a scheduler."""
    torch.manual_seed(0)
    chain = nn.Sequential(nn.BatchNorm1d(1), *(Half(w) for w in weights))
    norm, halves = list(chain[0].parameters()), [p for half in chain[1:] for p in half.parameters()]
    optimizer = Optimizers([torch.optim.SGD(norm, lr=0.1, momentum=0.9), torch.optim.AdamW(halves, lr=0.1)])
    workload = Workload(
        model=chain,
        batch=torch.randn(samples, 1),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        max_grad_norm=1.0,
    )
    scaler = LossScaler(LossScaling(**{"initial": 1.0, **scaling}))
    return Step(workload, StepOptions(microbatch_size=microbatch_size, scaler=scaler))


def unscaled_state(step: Step) -> Any:
    """The state of a training, without the loss scale."""
    scaler = step.scaler
    step.change(scaler=None)
    state = training_state(step)
    step.change(scaler=scaler)
    return state


def test_a_skipped_update_leaves_everything_as_it_was_for_all_optimizers() -> None:
    step = step_of([1.0, 2.0], initial=2.0**20)
    assert step.scaler is not None
    before = unscaled_state(step)
    skips = 0
    while (result := step(step.workload.batch)).skipped:
        skips += 1
        assert result.skips == skips and math.isnan(result.grad_norm) and step.steps == 0
        assert unscaled_state(step) == before
    assert 0 < skips < 20 and result.skips == skips and step.scaler.scale == 2.0 ** (20 - skips)
    assert step.workload.scheduler.last_epoch == 1  # type: ignore[union-attr]
    assert unscaled_state(step) != before


def test_an_overflow_in_one_microbatch_skips_the_whole_update() -> None:
    step = step_of([1.0, 2.0], samples=6, microbatch_size=2)
    before = unscaled_state(step)
    batch = step.workload.batch.clone()
    step.workload.model[0].eval()  # type: ignore[index]
    batch[2:4] = 1e5
    assert step(batch).skipped and step.steps == 0
    batch[2:4] = 1.0
    assert unscaled_state(step) == before
    assert not step(batch).skipped


def test_clipping_sees_unscaled_gradients() -> None:
    norms = []
    for scale in (1.0, 2.0**8):
        step = step_of([0.5, 0.5], initial=scale)
        before = torch.cat([p.detach().clone().reshape(-1) for p in step.workload.model[0].parameters()])  # type: ignore[index]
        result = step(step.workload.batch)
        after = torch.cat([p.detach().reshape(-1) for p in step.workload.model[0].parameters()])  # type: ignore[index]
        norms.append((result.grad_norm, after - before))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-2)
    torch.testing.assert_close(norms[0][1], norms[1][1], rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "scaling", "forward", "backward"),
    [
        ([1.0, 300.0, 300.0, 1e-3], {"growth_interval": None}, "3", "'4'"),
        ([1e3, 1e-3], {"initial": 2.0**20, "growth_interval": None}, None, "'2.weight'"),
    ],
)
def test_skips_without_end_name_the_first_module_forward_and_backward(
    weights: list[float], scaling: dict[str, Any], forward: str | None, backward: str
) -> None:
    step = step_of(weights, max_skips=3, **scaling)
    before = unscaled_state(step)
    assert step(step.workload.batch).skipped and step(step.workload.batch).skipped
    with pytest.raises(NonFiniteError, match=r"3 consecutive steps.*last in \d\.(weight|bias).*bf16-mixed") as caught:
        step(step.workload.batch)
    assert caught.value.forward == forward
    assert backward in str(caught.value.backward)
    assert caught.value.step == 0 and unscaled_state(step) == before


def test_what_is_not_finite_without_scaling_is_named_too() -> None:
    step = step_of([1.0, 300.0, 300.0])
    step.change(scaler=None)
    before = unscaled_state(step)
    with pytest.raises(NonFiniteError, match=r"forward: first the output of '3'") as caught:
        step(step.workload.batch)
    assert caught.value.forward == "3"
    assert unscaled_state(step) == before

"""Lean normalisations and activations as the planner's lever."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import memfit
from memfit.ir import Levers
from memfit.levers import LEVERS, NotOffered
from memfit.workload import Workload
from tests.models import plain_trace, recurrent, transformer, unet


def deep() -> Workload:
    """Products that are slow to run again, and norms and activations that are not."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(512, 1))
    return Workload(
        model=model,
        batch={"x": torch.randn(1024, 512)},
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        name="deep",
    )


@pytest.mark.ci
def test_a_plan_takes_them_where_they_are_enough_and_is_what_it_says() -> None:
    workload = deep()
    # A busy machine solves slowly.
    options: dict[str, Any] = {"numerics": "exact", "points": 2, "time_limit_seconds": 10}
    # At exactly what they need: with more, a few regions can be as fast, by what this processor's products allocate.
    roomy = memfit.plan(workload, budget="1GiB", **options)
    alone = next(point for point in roomy.frontier if point.levers == replace(roomy.levers, lean=("*",)))
    plan = memfit.plan(workload, budget=alone.peak_upper_bytes, **options)
    assert plan.levers.lean == ("*",)
    assert plan.classes["lean norms and activations"] == "exact"
    assert "outputs of all recomputed, inputs kept" in str(plan)
    found = memfit.verify(plan, workload, steps=0)
    assert found.holds
    assert found.bitwise
    assert found.measured_peak_bytes == plan.predicted.peak_bytes
    with memfit.apply(plan, workload) as step:
        step(workload.batch)


def test_what_fits_without_is_left_without() -> None:
    plan = memfit.plan(deep(), budget="1GiB", numerics="exact", points=2)
    assert plan.levers.lean == ()


@pytest.mark.parametrize(
    ("make", "peak_bytes", "text"),
    [
        (unet, 2**20, "norms, activations and dropouts keep less than 51.2 KiB"),
        (unet, 2**12, "it lowers the peak by less than 205 B"),
        (unet, 20, "it lowers the peak by less than 1 B"),
        (transformer, 20, "it lowers the peak by less than 1 B"),
        (recurrent, 2**40, "norms, activations and dropouts keep less than 51.2 GiB"),
    ],
)
def test_a_refusal_says_how_little_it_is_about(make: Callable[[], Workload], peak_bytes: int, text: str) -> None:
    """A model with little of them is not captured with them."""
    captured: list[Levers] = []
    step: Any = SimpleNamespace(
        workload=make(),
        plain=Levers(microbatch_size=2),
        trace=lambda levers: plain_trace(make.__name__),
        predicted=lambda levers: captured.append(levers) or SimpleNamespace(peak_bytes=peak_bytes),
        budget_bytes=None,
        tries_all=False,
        is_long=False,
    )
    (lever,) = (lever for lever in LEVERS if lever.name == "lean norms and activations")
    with pytest.raises(NotOffered, match=text):
        lever.propose(step, [step.plain])
    assert any(levers.lean for levers in captured) == ("lowers" in text)

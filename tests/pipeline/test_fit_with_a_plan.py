"""Loops that begin with a plan of an earlier run: nothing is planned, and a plan for another loop is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD, AdamW

import memfit
from memfit import ir
from memfit.errors import PlanMismatchError, UsageError
from memfit.ir import Plan
from memfit.pipeline import loop_plans
from tests.pipeline import loops
from tests.pipeline.test_fit import CASES, measured, plain_of


def planned(name: str, budget: str) -> Plan:
    loop, make, _ = CASES[name]
    models, optimizers = make()
    with memfit.fit(models, optimizers, budget=budget, tell=lambda _: None) as fitted:
        measured(loop, models, optimizers)
    assert fitted.plan is not None
    return fitted.plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that were planned for."""
    found: list[str] = []
    make = loop_plans.make_plan

    def counted(workload: Any, *options: Any, **others: Any) -> Plan:
        found.append(workload.name)
        return make(workload, *options, **others)

    monkeypatch.setattr(loop_plans, "make_plan", counted)
    return found


@pytest.mark.parametrize("name", ["loss outside", pytest.param("mixed precision", marks=pytest.mark.ci)])
def test_nothing_is_planned_while_the_plan_holds(name: str, plans: list[str], tmp_path: Path) -> None:
    losses, plain_bytes = plain_of(name)
    first = planned(name, f"{int(0.75 * plain_bytes)}B")
    path = ir.codec.write_atomic(tmp_path / "plan.json", ir.codec.encode(first))
    plans.clear()
    loop, make, _ = CASES[name]
    models, optimizers = make()
    with memfit.fit(models, optimizers, plan=path, tell=lambda _: None) as fitted:
        found, peak_bytes = measured(loop, models, optimizers)
    assert plans == [] and found == losses and peak_bytes <= 1.02 * first.budget_bytes
    assert fitted.plan is not None and fitted.plan.levers == first.levers
    assert fitted.plan.predicted.peak_bytes == first.predicted.peak_bytes


@pytest.mark.ci
def test_several_modules_are_under_it_from_the_second_step_on(plans: list[str]) -> None:
    losses, plain_bytes = plain_of("two optimizers")
    first = planned("two optimizers", f"{int(0.8 * plain_bytes)}B")
    plans.clear()
    models, optimizers = loops.pair()
    with memfit.fit(models, optimizers, plan=first, tell=lambda _: None) as fitted:
        assert measured(loops.adversarial, models, optimizers)[0] == losses
    assert fitted.plan is not None and fitted.plan.levers == first.levers
    assert first.workload not in plans or " and " not in first.workload


def test_a_batch_that_it_does_not_hold_is_planned_anew(plans: list[str]) -> None:
    first = planned("loss outside", "1.1x")
    tight = replace(first, budget_bytes=int(first.predicted.peak_bytes * 1.1))
    plans.clear()
    models, optimizers = loops.one()
    told: list[str] = []
    with memfit.fit(models, optimizers, plan=tight, tell=told.append) as fitted:
        for x, y in loops.batches(samples=2560):
            nn.functional.cross_entropy(models[0](x), y).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert len(plans) == 1 and any("plans it again" in text for text in told)
    assert fitted.plan is not None and fitted.plan.predicted.peak_upper_bytes <= tight.budget_bytes


@pytest.mark.parametrize(
    ("model", "kind"),
    [(lambda: loops.deep(blocks=3), AdamW), (lambda: loops.deep(), SGD), (lambda: loops.deep(width=32), AdamW)],
    ids=["layers", "optimizer", "width"],
)
def test_one_for_another_loop_is_refused_by_its_second_step(model: Any, kind: type[torch.optim.Optimizer]) -> None:
    first = planned("loss outside", "1GiB")
    other = model()
    optimizer = kind(other.parameters(), lr=0.1)
    width = next(other.parameters()).shape[1]
    steps = 0
    with (
        pytest.raises(PlanMismatchError, match=r"optimizer or device\. Leave out plan= and give budget="),
        memfit.fit(other, optimizer, plan=first, tell=lambda _: None),
    ):
        for x, y in loops.batches(samples=64, width=width):
            nn.functional.cross_entropy(other(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == 1


def test_it_stands_for_a_budget() -> None:
    models, optimizers = loops.one()
    for given in ({}, {"budget": "1GiB", "plan": "plan.json"}):
        with pytest.raises(UsageError, match="give one of budget= and plan="):
            memfit.fit(models, optimizers, **given)  # type: ignore[arg-type]

"""Loops with a plan to begin with: the one of an earlier run that is given, or the one that was kept from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
from memfit.pipeline import Fitted, loop_plans
from tests.pipeline import loops
from tests.pipeline.test_fit import CASES, measured, plain_of


def planned(name: str, budget: str) -> Plan:
    loop, make, _ = CASES[name]
    models, optimizers = make()
    with memfit.fit(models, optimizers, budget=budget, tell=loops.quiet) as fitted:
        measured(loop, models, optimizers)
    assert fitted.plan is not None
    return fitted.plan


@pytest.mark.parametrize("name", ["loss outside", pytest.param("mixed precision", marks=pytest.mark.ci)])
def test_nothing_is_planned_while_the_plan_holds(name: str, tmp_path: Path) -> None:
    losses, plain_bytes = plain_of(name)
    first = planned(name, f"{int(0.75 * plain_bytes)}B")
    path = ir.codec.write_atomic(tmp_path / "plan.json", ir.codec.encode(first))
    loop, make, _ = CASES[name]
    (models, optimizers), plans = make(), loops.Plans()
    with memfit.fit(models, optimizers, plan=path, tell=loops.quiet, progress=plans) as fitted:
        found, peak_bytes = measured(loop, models, optimizers)
    assert plans.made == 0 and found == losses and peak_bytes <= 1.02 * first.budget_bytes
    assert fitted.plan is not None and fitted.plan.levers == first.levers
    assert fitted.plan.predicted.peak_bytes == first.predicted.peak_bytes


@pytest.mark.ci
def test_several_modules_are_under_it_from_the_second_step_on() -> None:
    losses, plain_bytes = plain_of("two optimizers")
    first = planned("two optimizers", f"{int(0.8 * plain_bytes)}B")
    (models, optimizers), plans = loops.pair(), loops.Plans()
    with memfit.fit(models, optimizers, plan=first, tell=loops.quiet, progress=plans) as fitted:
        assert measured(loops.adversarial, models, optimizers)[0] == losses
    assert fitted.plan is not None and fitted.plan.levers == first.levers
    assert plans.made == 4  # for each of them by itself, for its first step


def test_a_batch_that_it_does_not_hold_is_planned_anew() -> None:
    first = planned("loss outside", "1.1x")
    tight = replace(first, budget_bytes=int(first.predicted.peak_bytes * 1.1))
    (model,), (optimizer,) = loops.one()
    told, plans = list[str](), loops.Plans()
    with memfit.fit(model, optimizer, plan=tight, tell=told.append, progress=plans) as fitted:
        for _ in range(3):
            loops.updated(optimizer, loops.classified(model, 2560))
    assert plans.made == 1 and any("plans it again" in text for text in told)
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
        memfit.fit(other, optimizer, plan=first, tell=loops.quiet),
    ):
        for _ in range(3):
            loops.updated(optimizer, loops.classified(other, 64, width))
            steps += 1
    assert steps == 1


def test_it_stands_for_a_budget() -> None:
    models, optimizers = loops.one()
    for given in ({}, {"budget": "1GiB", "plan": "plan.json"}):
        with pytest.raises(UsageError, match="give one of budget= and plan="):
            memfit.fit(models, optimizers, **given)  # type: ignore[arg-type]


class Block(nn.Module):
    """A block with a setting that no shape shows."""

    def __init__(self, width: int, slope: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.slope = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.leaky_relu(self.up(x), self.slope).sin())


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> loops.Plans:
    """Keep plans in a folder of the test's own, for a program of its own; return the count of those that are made."""
    script = tmp_path / "train.py"
    script.write_text("print('training')")
    monkeypatch.setattr(loop_plans, "is_on", True)
    monkeypatch.setattr(sys, "argv", [str(script), "--seed", "1"])
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    return loops.Plans()


def trained(
    plans: loops.Plans,
    width: int = 16,
    rows: int = 256,
    slope: float = 0.1,
    budget: str = "0.8x",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    squared: bool = True,
    fails: bool = False,
) -> tuple[Fitted, list[float], list[str]]:
    """Return a fitted loop of four steps, its losses, and what was told; it may fail in its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, slope) for _ in range(4)))
    updates = optimizer(model.parameters(), lr=0.01)
    losses, told = [], list[str]()
    given: dict[str, Any] = {"budget": budget, "tell": told.append, "time_limit_seconds": 0.5, "progress": plans}
    with memfit.fit(model, updates, **given) as fitted:
        for _ in range(4):
            out = model(torch.randn(rows, width))
            if fails:
                raise ValueError("bad")
            losses.append(loops.updated(updates, out.square().mean() if squared else out.abs().mean()))
    return fitted, losses, told


def test_the_second_start_of_a_program_plans_nothing(plans: loops.Plans) -> None:
    first, losses, told = trained(plans)
    count = plans.made
    assert count == 2 and not any("an earlier start" in line for line in told)
    second, again, told_again = trained(plans)
    assert plans.made == count and again == losses
    assert second.plan == first.plan and second.plan is not None and second.plan.levers.regions
    assert any("an earlier start" in line for line in told_again)


@pytest.mark.parametrize(
    "changed",
    [*({k: v} for k, v in {"width": 24, "rows": 320, "slope": 0.2, "budget": "0.7x"}.items())]
    + [{"optimizer": torch.optim.AdamW}, {"squared": False}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_program_is_planned_anew(changed: dict[str, Any], plans: loops.Plans) -> None:
    trained(plans)
    count = plans.made
    trained(plans, **changed)
    assert plans.made > count


def test_changed_sources_arguments_and_settings_make_another_program(
    plans: loops.Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(plans)
    count, script = plans.made, Path(sys.argv[0])
    script.write_text("print('training otherwise')")
    trained(plans)
    assert plans.made == count + 2
    monkeypatch.setattr(sys, "argv", [str(script), "--seed", "2"])
    trained(plans)
    assert plans.made == count + 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained(plans)
    assert plans.made == count + 6


def test_damaged_records_are_made_again(plans: loops.Plans, tmp_path: Path) -> None:
    trained(plans)
    count, paths = plans.made, list((tmp_path / "plans").iterdir())
    assert len(paths) >= 2
    for path in paths:
        path.write_text(path.read_text()[:100])
    trained(plans)
    assert plans.made == 2 * count


def test_a_loop_that_fails_keeps_nothing_of_what_it_took(plans: loops.Plans) -> None:
    trained(plans)
    count = plans.made
    with pytest.raises(ValueError, match="bad"):
        trained(plans, fails=True)
    trained(plans)
    assert plans.made > count


def test_a_program_without_a_file_keeps_nothing(
    plans: loops.Plans, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    trained(plans)
    assert not (tmp_path / "plans").exists()

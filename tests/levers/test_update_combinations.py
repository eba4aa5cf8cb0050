"""Which optimizer, where its state is and when it updates, together: the numbers of each alone, with less in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import memfit
from memfit.capture import real_copy
from memfit.errors import InfeasibleError, PlanError
from memfit.ir import Levers, Region
from memfit.levers import applied
from memfit.recipes import byte_lm
from memfit.workload import Workload
from tests.measuring import peaks
from tests.update_settings import update_settings


def language_model(optimizer: Any = torch.optim.AdamW, **options: Any) -> Workload:
    """A language model with two groups of parameters, whose rates and decays differ."""
    sizes = {"n_layer": 2, "d_model": 64, "n_head": 2, "context": 16, "batch_size": 4, "vocabulary_size": 512}
    made = byte_lm(max_grad_norm=None, max_bytes=200_000, **{**sizes, **options})
    embeddings = [made.model.embed.weight, made.model.positions.weight]
    others = [p for p in made.model.parameters() if all(p is not e for e in embeddings)]
    groups = [{"params": embeddings, "lr": 3e-3}, {"params": others, "weight_decay": 0.1}]
    return dataclasses.replace(made, optimizer=optimizer(groups, lr=1e-3))


def trained(workload: Workload, values: Sequence[str], steps: int = 3, **levers: Any) -> list[Tensor]:
    """Return weights and the user's optimizer's state after some steps, of which the first is as the user wrote it."""
    copied = real_copy(workload)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(copied.optimizer, 0.5)
    copied = dataclasses.replace(copied, scheduler=scheduler)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for count, settings in ((1, {}), (steps, update_settings(*values))):
            with applied(Levers(microbatch_size=4, **levers, **settings), copied) as step:
                for _ in range(count):
                    step(copied.batch)
    assert all(p.grad is None for p in copied.model.parameters())
    state = [value for p in copied.model.parameters() for value in copied.optimizer.state[p].values()]
    return [t.detach() for t in (*copied.model.parameters(), *state) if isinstance(t, Tensor)]


@pytest.mark.parametrize(
    ("alone", "others"),
    [
        ("as-is", ("in-backward", "offloaded")),
        ("fused", ("in-backward",)),
        ("fused", ("in-backward", "offloaded")),
        ("adamw-8bit", ("in-backward",)),
        ("adamw-8bit", ("offloaded",)),
        ("adamw-8bit", ("in-backward", "offloaded")),
        ("adamw-4bit", ("in-backward",)),
        ("adamw-4bit", ("in-backward", "offloaded")),
        ("adafactor", ("in-backward",)),
        ("adafactor", ("in-backward", "offloaded")),
    ],
)
@pytest.mark.parametrize("levers", [{}, {"regions": (Region(("blocks.0",)), Region(("blocks.1.mlp",)))}], ids=str)
def test_numbers_are_those_of_the_optimizer_alone(alone: str, others: tuple[str, ...], levers: dict[str, Any]) -> None:
    if levers and "offloaded" in others:
        return
    made = language_model()
    found, expected = trained(made, (alone, *others), **levers), trained(made, (alone,))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert alone == "as-is" or not all(map(torch.equal, found, trained(made, ())))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adafactor])
def test_offloaded_states_of_any_optimizer_are_used_in_the_backward_pass(kind: Any) -> None:
    made = language_model(kind)
    found, expected = trained(made, ("in-backward", "offloaded")), trained(made, ())
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "values",
    [
        ("in-backward", "adamw-8bit"),
        ("in-backward", "adamw-4bit"),
        ("in-backward", "adafactor"),
        ("in-backward", "fused"),
    ],
)
def test_peaks_are_predicted(values: tuple[str, ...]) -> None:
    made = language_model(n_layer=3, d_model=128, context=8, batch_size=1)
    alone, _ = peaks(made, Levers(microbatch_size=1, update="in-backward"))
    predicted, measured = peaks(made, Levers(microbatch_size=1, **update_settings(*values)))
    assert predicted == pytest.approx(measured, rel=0.005)
    assert predicted < alone


class Large(nn.Module):
    """Layers whose weights, gradients and states are nearly all that a step holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def large() -> Workload:
    model = Large()
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, torch.randn(4, 256), lambda m, x: m(x).square().mean(), optimizer, name="large")


def lowest(workload: Workload, *optimizers: Any) -> int:
    options: dict[str, Any] = {"numerics": "reduced", "precisions": ["32-true"], "points": 1}
    with pytest.raises(InfeasibleError) as error:
        memfit.plan(workload, budget="4KiB", optimizers=optimizers, **options)
    return error.value.lowest_peak_bytes


def test_a_plan_takes_two_where_neither_alone_fits() -> None:
    made = large()
    both, first, second = (lowest(made, *x) for x in (("in-backward", "adamw-8bit"), ("in-backward",), ("adamw-8bit",)))
    assert both < 0.8 * min(first, second)
    plan = memfit.plan(
        made, budget=(both + min(first, second)) // 2, numerics="reduced", precisions=["32-true"], points=1
    )
    assert (plan.levers.optimizer, plan.levers.update) == ("adamw-8bit", "in-backward")
    assert plan.classes == {"AdamW with 8-bit states": "reduced", "optimizer in the backward pass": "exact"}
    found = memfit.verify(plan, made, steps=0)
    assert found.holds and found.measured_peak_bytes <= plan.budget_bytes, found.failures
    plan_of_one = memfit.plan(made, budget=first, numerics="reduced", precisions=["32-true"], points=1)
    used = plan_of_one.levers.optimizer != "as-is", plan_of_one.levers.update != "after"
    assert sum(used) == 1  # nothing is tried together where one is enough


def test_what_was_begun_with_some_groups_is_undone_for_them() -> None:
    """An optimizer that runs out of memory in its first step for some parameters is set back."""
    made = language_model(torch.optim.SGD)
    plan = memfit.plan(made, budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    in_backward = replace(plan, levers=replace(plan.levers, update="in-backward"), frontier=[])

    def fails(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 7.0
        raise torch.OutOfMemoryError

    with memfit.apply(in_backward, made, recover=True) as step:
        handle = made.optimizer.register_step_pre_hook(fails)
        with pytest.raises(memfit.OutOfMemoryError) as error:
            step(made.batch)
        handle.remove()
        assert not error.value.is_torn
        assert [group["lr"] for group in made.optimizer.param_groups] == [3e-3, 1e-3]
        step(made.batch)


@pytest.mark.parametrize(
    ("value", "instead"), [("in-backward", "levers.update to 'in-backward'"), ("offloaded", "levers.optimizer_state")]
)
def test_a_plan_of_earlier_settings_says_what_to_write(value: str, instead: str, tmp_path: Path) -> None:
    plan = memfit.plan(large(), budget="1GiB", numerics="exact", points=1)
    file = tmp_path / "plan.json"
    plan.save(file)
    file.write_text(file.read_text().replace('"optimizer": "as-is"', f'"optimizer": "{value}"'))
    with pytest.raises(PlanError, match=f"plan.json is not a valid plan: .*What to do: set {instead}"):
        memfit.Plan.load(file)
    with pytest.raises(PlanError, match=f"levers.optimizer='{value}' is a setting of its own: set {instead}"):
        replace(plan.levers, optimizer=value)

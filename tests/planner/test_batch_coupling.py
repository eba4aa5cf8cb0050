"""Losses that couple the samples of a batch are told from those that don't, and microbatches left out for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.errors import PlanError
from memfit.planner import coupled_samples
from memfit.workload import Workload
from tests.models import BUILDERS

BATCH = 12
SAMPLES = 8  # that are looked at, at most
Loss = Callable[[nn.Module, Any], Any]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def over_valid_ones(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wrong = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none") * batch["valid"]
    return wrong.sum(), batch["valid"].sum()


def dice_by_sample(model: nn.Module, batch: Any) -> torch.Tensor:
    p, truth = model(batch["x"]).sigmoid(), batch["truth"]
    return (1 - 2 * (p * truth).sum(1) / (p + truth).sum(1)).mean()


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})


def dice_over_the_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    p, truth = model(batch["x"]).sigmoid(), batch["truth"]
    return 1 - 2 * (p * truth).sum() / (p + truth).sum()


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    features = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(features @ features.roll(1, 0).T / 0.1, torch.arange(len(features)))


def over_the_largest(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch["x"])
    return (out.exp().sum(1) / out.exp().max()).mean()


def mean_over_valid_ones(model: nn.Module, batch: Any) -> torch.Tensor:
    total, count = over_valid_ones(model, batch)
    return total / count


def sum_without_a_count(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")


LOSSES: dict[Loss, bool] = dict.fromkeys((cross_entropy, over_valid_ones, dice_by_sample, noisy), False)
COUPLED = (dice_over_the_batch, contrastive, over_the_largest, mean_over_valid_ones, sum_without_a_count)
LOSSES |= dict.fromkeys(COUPLED, True)


def workload_of(loss_fn: Loss, samples: int = BATCH, **changes: Any) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 4))
    batch = {
        "x": torch.randn(samples, 6),
        "labels": torch.randint(4, (samples,)),
        "truth": (torch.rand(samples, 4) < torch.linspace(0.1, 0.9, samples)[:, None]).float(),
        "valid": torch.linspace(1.0, 0.0, samples).round(decimals=1),  # the padded ones come last, as when sorted
    }
    return Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **changes)


@pytest.mark.parametrize("samples", [2, 3, BATCH])
@pytest.mark.parametrize(("loss_fn", "is_coupled"), LOSSES.items())
def test_losses_that_do_not_add_up_are_found(loss_fn: Loss, is_coupled: bool, samples: int) -> None:
    found = coupled_samples(workload_of(loss_fn, samples))
    said = f"the loss of {min(samples, SAMPLES)} samples is"
    assert (found is not None and said in found) if is_coupled else found is None


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_no_shared_workload_is_accused(name: str) -> None:
    """Tied and frozen parts, BatchNorm (which the program shows), attention, recurrence: none looks across samples."""
    assert coupled_samples(BUILDERS[name]()) is None


def test_nothing_is_changed_no_gradient_is_made_and_few_samples_are_run() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(6, 4), nn.Buffer(torch.zeros(()))
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(x)
            out: torch.Tensor = self.inner(x)
            return out

    class Largest(TorchDispatchMode):
        samples = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:
                self.samples = max(self.samples, len(args[1]))
            return func(*args, **(kwargs or {}))

    model = Counting().train()
    workload = dataclasses.replace(workload_of(cross_entropy, 500), model=model)
    state = torch.get_rng_state()
    with Largest() as largest:  # type: ignore[no-untyped-call]
        assert coupled_samples(workload) is None
    assert largest.samples == SAMPLES  # however large the batch is
    assert float(model.calls) == 0 and model.seen == [] and model.training and model.inner.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_said_without_data_or_where_the_loss_fails() -> None:
    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch["x"]) < BATCH:
            raise ValueError("made for whole batches")
        return contrastive(model, batch)

    assert coupled_samples(workload_of(failing)) is None
    assert coupled_samples(workload_of(contrastive, 1)) is None
    half = workload_of(contrastive)
    half.model.bfloat16()
    assert coupled_samples(half) is None
    with torch.device("meta"):
        model = nn.Linear(6, 4)
    assert coupled_samples(dataclasses.replace(workload_of(contrastive), model=model)) is None


def test_microbatches_are_left_out_of_plans_unless_allowed() -> None:
    workload = workload_of(contrastive)
    options: dict[str, Any] = {"budget": "90%", "precisions": ["32-true"], "points": 1}
    plan = memfit.plan(workload, **options)
    assert {c.levers.microbatch_size for c in plan.frontier} == {BATCH}
    (note,) = [note for note in plan.notes if "couples the samples" in note]
    assert "the loss of 8 samples is" in note and "(sum, count)" in note
    free = memfit.plan(workload_of(contrastive), numerics="changed", **options)
    classes = {c.numerics for c in free.frontier if c.levers.microbatch_size < BATCH}
    assert classes == {"changed"} and not any("couples" in note for note in free.notes)
    assert len({c.levers.microbatch_size for c in memfit.plan(workload_of(cross_entropy), **options).frontier}) > 1


def test_plans_that_were_made_from_shapes_are_checked_where_the_data_is() -> None:
    """As plans for GPUs are, made elsewhere."""
    plan = memfit.plan(workload_of(cross_entropy), budget="90%", precisions=["32-true"], points=1)
    elsewhere = replace(plan, device="a100-80gb")
    cut = replace(elsewhere, levers=replace(plan.levers, microbatch_size=4))
    with memfit.apply(cut, workload_of(cross_entropy)) as step:
        assert step.options.microbatch_size == 4
    with pytest.raises(PlanError, match=r"microbatch_size=4 of 12.*couples the samples.*numerics='changed'"):
        memfit.apply(cut, workload_of(contrastive))
    memfit.apply(replace(cut, numerics="changed"), workload_of(contrastive)).close()
    with memfit.apply(elsewhere, workload_of(contrastive), recover=True) as step:
        lower = step.recovery.plan  # type: ignore[union-attr]
    assert {c.levers.microbatch_size for c in lower.frontier} == {BATCH}
    assert len({c.levers.microbatch_size for c in elsewhere.frontier}) > 1

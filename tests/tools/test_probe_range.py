from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.ir import Levers, ValueStatistics, range_report
from memfit.levers import applied
from memfit.tools import probe_range
from memfit.tools._probe_range import ExponentSums
from memfit.workload import LossScaling, Workload
from tests.models import BUILDERS


class Product(nn.Module):
    """Two linear layers and a product that no module makes."""

    def __init__(self, first: float, product: float) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.fourth, self.fifth, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.product = product
        for layer, size in ((self.first, first), (self.second, 1 / first)):
            with torch.no_grad():
                layer.weight.copy_(torch.eye(8) * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.second(self.first(x)))
        y = self.fifth(self.fourth((y * self.product) @ torch.eye(8, dtype=y.dtype) / self.product))
        out: torch.Tensor = self.last(y)
        return out


def workload_of(first: float = 1.0, product: float = 1.0, loss: float = 1.0, **changes: Any) -> Workload:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": Product(first, product)})
    return Workload(
        model=model,
        batch=torch.randn(64, 8),
        loss_fn=lambda model, batch: model["body"](batch).float().square().mean() * loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        **changes,
    )


def skips(workload: Workload) -> bool:
    with applied(Levers(precision="16-mixed", microbatch_size=64), workload) as step:
        return step(workload.batch).skipped


def test_a_step_that_fits_fp16_needs_nothing_but_a_scale() -> None:
    workload = workload_of()
    found = probe_range(workload)
    layers = ("first", "second", "third", "fourth", "fifth", "last")
    assert [m.module for m in found.modules] == ["body", *(f"body.{name}" for name in layers)]
    assert (found.precision, found.fp32_modules, found.overflowing, found.flushing) == ("16-mixed", [], [], [])
    largest = max(m.gradients.largest for m in found.modules)
    assert 65504 / 8 < largest * found.initial_scale <= 65504 / 4 or found.initial_scale == 2.0**24
    assert not skips(dataclasses.replace(workload, loss_scaling=LossScaling(initial=found.initial_scale)))
    assert "LossScaling(initial=" in str(found)


def test_modules_whose_activations_overflow_are_named_and_fp32_helps_there() -> None:
    workload = workload_of(first=1e5)
    assert skips(workload)
    found = probe_range(workload)
    assert found.overflowing == ["body.first", "body.second"]
    assert found.precision == "bf16-mixed" or found.fp32_modules == found.overflowing
    kept = dataclasses.replace(workload, fp32_modules=tuple(found.overflowing))
    assert not skips(kept)
    assert not probe_range(kept).overflowing
    assert probe_range(workload_of(product=1e5)).overflowing == ["body"]  # a product is seen at the module around it


def test_gradients_that_flush_are_seen_and_a_scale_helps() -> None:
    found = probe_range(workload_of(loss=1e-7))
    flushed = {m.module: m.gradients.flushed() for m in found.modules}
    assert flushed["body.last"] > 0.5
    assert all(m.gradients.flushed(found.initial_scale) < 0.05 for m in found.modules) and not found.flushing


def test_the_gradient_of_a_loss_in_16_bits_is_seen() -> None:
    workload = workload_of()
    in_16_bits = dataclasses.replace(workload, loss_fn=lambda model, batch: model["body"](batch).abs().mean())
    found = probe_range(in_16_bits)
    assert found.modules[0].gradients.largest == 1.0 and found.initial_scale <= 2.0**13
    assert not skips(dataclasses.replace(in_16_bits, loss_scaling=LossScaling(initial=found.initial_scale)))


def test_shares_that_flush_are_those_that_pytorch_rounds_to_zero() -> None:
    torch.manual_seed(0)
    values = torch.randn(10_000) * torch.exp2(torch.randint(-40, 10, (10_000,)).float())
    numbers = ExponentSums()
    numbers.add(values)
    for scale in (1.0, 2.0**10):
        lost = values.abs().double()[(values * scale).half() == 0].sum() / values.abs().double().sum()
        assert numbers.seen().flushed(scale) == pytest.approx(float(lost), rel=1e-6)
    assert numbers.seen().largest == float(values.abs().max())


@pytest.mark.parametrize("name", BUILDERS)
def test_ordinary_models_suit_fp16_and_are_left_as_they_were(name: str) -> None:
    workload = BUILDERS[name]()
    before = {n: t.clone() for n, t in workload.model.state_dict().items()}
    rng = torch.get_rng_state()
    found = probe_range(workload, batches=2, microbatch_size=1)
    assert found.precision == "16-mixed" and not found.overflowing and len(found.modules) > 1
    assert all(torch.equal(t, before[n]) for n, t in workload.model.state_dict().items())
    assert all(p.grad is None for p in workload.model.parameters()) and torch.equal(rng, torch.get_rng_state())


def test_what_leaves_the_range_all_over_asks_for_bf16() -> None:
    wide, fine = ValueStatistics(largest=1e9, sums={29: 1}), ValueStatistics(largest=1.0, sums={0: 1})
    many = {str(n): wide if n < 3 else fine for n in range(8)}
    assert range_report(many, {}).precision == "bf16-mixed"
    assert "'0', '1', '2'" in range_report(many, {}).advice()
    few = {str(n): wide if n < 1 else fine for n in range(8)}
    assert range_report(few, {}).fp32_modules == ["0"]
    assert range_report({"a": ValueStatistics(largest=1.0, not_finite=1)}, {}).overflowing == ["a"]
    assert range_report({"a": fine}, {"a": ValueStatistics()}).initial_scale == 1.0
    assert math.log2(range_report({"a": fine}, {"a": fine}).initial_scale) == 13


def test_no_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="batches=0"):
        probe_range(workload_of(), batches=0)

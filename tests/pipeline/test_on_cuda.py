"""Predictions against the GPU that is here: run where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memfit
from benchmarks import on_accelerator
from benchmarks.common import Measured
from memfit.ir import Levers, Precision
from memfit.recipes import byte_lm
from memfit.workload import Workload, batch_size_of
from tests.models import BUILDERS, LARGE

pytestmark = pytest.mark.gpu


def measure(workload: Workload, levers: Levers) -> Measured:
    return on_accelerator.measure(workload, levers, torch.device("cuda", 0))


MAKERS: dict[str, Callable[[], Workload]] = {
    "byte_lm": lambda: byte_lm(n_layer=8, d_model=512, n_head=8, context=512, batch_size=16),
    **{name: lambda name=name: BUILDERS[name](**LARGE[name]) for name in ("convnet", "unet")},  # type: ignore[misc]
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_allocated_and_reserved_are_as_predicted(name: str, precision: Precision) -> None:
    workload = MAKERS[name]()
    predicted = memfit.estimate(workload, device="cuda", precision=precision)
    found = measure(workload, Levers(precision=precision, microbatch_size=batch_size_of(workload.batch)))
    assert predicted.peak_reserved_bytes is not None
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)
    assert predicted.peak_reserved_bytes == pytest.approx(found.peak_reserved_bytes, rel=0.06)
    assert found.peak_reserved_bytes <= predicted.peak_upper_bytes


def test_a_plan_for_the_gpu_keeps_its_budget() -> None:
    workload = MAKERS["byte_lm"]()
    plain = memfit.estimate(workload, device="cuda", precision="bf16-mixed")
    plan = memfit.plan(workload, budget=plain.peak_upper_bytes * 6 // 10, device="cuda", numerics="reduced", points=1)
    assert measure(workload, plan.levers).peak_reserved_bytes <= plan.budget_bytes

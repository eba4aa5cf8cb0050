"""Precisions as contexts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import pytest
import torch

from memfit.errors import WorkloadError
from memfit.ir import Levers, Precision, Region
from memfit.levers import applied
from memfit.levers.precision import autocast
from memfit.workload import Workload
from tests.models import BUILDERS


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
def test_matrix_products_run_in_the_precision(precision: Precision, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with autocast(precision, "cpu"):
        assert layer(torch.ones(2, 4)).dtype is dtype
        assert layer.weight.dtype is torch.float32
    assert layer(torch.ones(2, 4)).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_a_setting_of_the_step_alone() -> None:
    seen = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return model(batch).mean()

    model = torch.nn.Linear(3, 1)
    workload = Workload(model, torch.ones(2, 3), loss_fn, torch.optim.SGD(model.parameters()))
    with applied(Levers(precision="tf32", microbatch_size=1), workload) as step:
        step(workload.batch)
        step.gradients(workload.batch)
        assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["high"] * 4


# Modules that stay in fp32


def dtypes_of(workload: Workload, levers: Levers) -> dict[str, torch.dtype]:
    """Return the dtype of what each linear layer makes."""
    found: dict[str, torch.dtype] = {}
    with applied(levers, workload) as step, contextlib.ExitStack() as stack:
        for name, module in workload.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                hook = functools.partial(lambda n, m, args, out: found.__setitem__(n, out.dtype), name)
                stack.callback(module.register_forward_hook(hook).remove)
        step.compute_loss(workload.batch)
    return found


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_modules_that_are_named_compute_in_fp32(precision: Precision, dtype: torch.dtype) -> None:
    workload = BUILDERS["transformer"]()
    levers = Levers(precision=precision, microbatch_size=2)
    plain = dtypes_of(workload, levers)
    assert set(plain.values()) == {dtype}
    kept = dtypes_of(dataclasses.replace(workload, fp32_modules=("blocks.0", "h?ad")), levers)
    assert kept == {n: torch.float32 if n.startswith("blocks.0.") or n == "head" else dtype for n in plain}
    assert dtypes_of(workload, levers) == plain


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    workload = dataclasses.replace(BUILDERS["transformer"](), fp32_modules=("heads",))
    with (
        pytest.raises(WorkloadError, match="fp32_modules has 'heads'"),
        applied(Levers(precision="bf16-mixed", microbatch_size=2), workload),
    ):
        pass


class Careful(torch.nn.Module):
    """Switches autocast off for its middle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.middle(x.float()).exp()
        return self.last(x)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fp32_modules", [(), ("1.first", "2")])
def test_autocast_is_the_same_in_a_recomputation(precision: Precision, fp32_modules: tuple[str, ...]) -> None:
    regions = [(), (Region(("0",)), Region(("1", "2"))), (Region(("1.first",)), Region(("2",)))]
    found = []
    for chosen in regions:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Careful(), Careful(), Careful())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workload = Workload(
            model, torch.randn(4, 8), lambda m, b: m(b).float().square().mean(), optimizer, fp32_modules=fp32_modules
        )
        with applied(Levers(precision=precision, microbatch_size=2, regions=chosen), workload) as step:
            found.append(step.gradients(workload.batch))
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(g, found[0][1][name]) for name, g in gradients.items())

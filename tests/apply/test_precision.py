"""Precisions as contexts."""

from __future__ import annotations

import pytest
import torch

from memfit.apply.precision import autocast
from memfit.ir.plan import Precision


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


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_sums_and_losses_stay_in_fp32(precision: Precision) -> None:
    with autocast(precision, "cpu"):
        logits = torch.nn.Linear(4, 4)(torch.ones(2, 4))
        assert torch.nn.functional.mse_loss(logits, torch.zeros(2, 4)).dtype is torch.float32


def test_autocast_keeps_small_differences_small_but_not_zero() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    with autocast("bf16-mixed", "cpu"):
        rounded = layer(x).float()
    error = (rounded - layer(x)).norm() / layer(x).norm()
    assert 0 < error < 0.02

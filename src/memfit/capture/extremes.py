"""Backward passes of `max`, `min` and medians of all elements, run on the CPU as without a dispatch mode.

Without a mode they read whether the result is NaN, and fill the gradient in place (`evenly_distribute_backward` in
torch/csrc/autograd/FunctionsManual.cpp); under one they do neither. Here no result is taken to be NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.products import Run, register


def register_extremes(library: torch.library.Library) -> None:
    """Fill the gradients of extremes in place on the CPU, as long as a library lives."""
    register(library, "AutogradCPU", dict.fromkeys(("max", "min", "median", "nanmedian"), _Extreme.apply))


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, given: Tensor) -> Tensor:
        result = run(given)
        ctx.save_for_backward(given, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        is_one = given == result
        zeros = grad.new_zeros(given.shape)
        return None, zeros.masked_fill_(is_one, grad / is_one.sum())

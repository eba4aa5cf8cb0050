"""The largest, the smallest and the median of all elements, whose backward pass on the CPU is another under a mode.

Without a mode it reads whether the result is a number, and fills the gradient in place (`evenly_distribute_backward` in
torch/csrc/autograd/FunctionsManual.cpp); under one it does neither, as on a GPU. It is taken to be a number here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.capture.products import Run, computed_as


def filled_as_without_a_mode(library: torch.library.Library) -> None:
    """Have gradients of extremes filled in place on the CPU, as long as a library lives."""
    for name in ("max", "min", "median", "nanmedian"):
        library.impl(
            name,
            computed_as(torch.library.get_kernel(f"aten::{name}", "AutogradCPU"), _extreme),
            "AutogradCPU",
            with_keyset=True,
        )


def _extreme(run: Run, given: Tensor) -> Tensor:
    result: Tensor = _Extreme.apply(run, given)  # type: ignore[no-untyped-call]
    return result


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

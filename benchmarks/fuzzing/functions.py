"""Autograd functions that random programs call: each saves something else, or returns something unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


class SavesInput(torch.autograd.Function):
    """Cubes, and saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh().pow(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        y = x.tanh()
        return gradient * 3 * y * y * (1 - y * y)


class SavesOutput(torch.autograd.Function):
    """Takes the exponential, and saves what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp(max=1).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0]


class SavesBetween(torch.autograd.Function):
    """Saves what it made on the way, as an attribute and for the backward pass, and returns a mask too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        half = x * 0.5
        ctx.half = half.detach()
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        return half.masked_fill(mask, 0.25), mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return (gradient * 0.5).masked_fill(mask, 0) + 0.0 * ctx.half


class ChangesInput(torch.autograd.Function):
    """Changes what it is given in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 0.5


class PassesThrough(torch.autograd.Function):
    """Rounds, and lets the gradient through; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Reverses(torch.autograd.Function):
    """Returns a view, and its gradient the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.neg()


class RunsAgain(torch.autograd.Function):
    """Keeps its operand only, and runs autograd within its backward pass: checkpointing by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.tanh(x * 0.5).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = torch.tanh(x * 0.5).exp()
        return torch.autograd.grad(y, x, gradient)[0]


def _applying(function: Any) -> Callable[..., Any]:
    return lambda x, n: function.apply(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function_input": _applying(SavesInput),
    "function_output": _applying(SavesOutput),
    "function_between": _applying(SavesBetween),
    "function_in_place": lambda x, n: _applying(ChangesInput)(x * 1.0 if n % 2 else x, n),
    "function_through": _applying(PassesThrough),
    "function_view": _applying(Reverses),
    "function_again": _applying(RunsAgain),
}

"""Backward passes of `prod` and `cumprod`, run as without a dispatch mode.

They read whether an element is 0, and take a leaner formula where none is; under a mode they always take the formula
for zeros (`prod_backward` and `cumprod_backward` in torch/csrc/autograd/FunctionsManual.cpp). Temporary tensors have
names where C++ keeps them to the end of a statement, and Python would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memfit._torch.autograd import forward_ad_level
from memfit._torch.dispatch import peek_interpreter_stack
from memfit.turns import has_turn

Run = Callable[[Tensor], Tensor]
"""A function that runs PyTorch's own kernel, with its own backward formula."""


def register_products(library: torch.library.Library, key: str) -> None:
    """Register products whose backward pass reads, at a dispatch key, as long as a library lives."""
    register(library, key, {"prod": _Prod.apply, "prod.dim_int": _along, "cumprod": _Cumprod.apply})


def register(library: torch.library.Library, key: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register operators with a backward pass of their own, by name, as `with_own_backward` takes them."""
    for name, function in functions.items():
        kernel = torch.library.get_kernel(f"aten::{name}", key)
        library.impl(name, with_own_backward(kernel, function), key, with_keyset=True)


def is_transformed() -> bool:
    """Tell whether `torch.func` or forward-mode differentiation is under way."""
    return peek_interpreter_stack() is not None or forward_ad_level() >= 0


def with_own_backward(kernel: Any, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a kernel that computes as another, with a backward pass of its own.

    Under `torch.func` and forward-mode differentiation, and in threads that capture nothing, the other kernel runs.

    Args:
        kernel: The kernel of an operator at a dispatch key.
        function: Called with a function that runs that kernel, and the operator's arguments.
    """

    def run(keys: Any, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def as_pytorch(given: Tensor) -> Tensor:
            result: Tensor = kernel.call_boxed(keys, given, *args, **kwargs)
            return result

        if not has_turn():
            return as_pytorch(given)
        if (
            is_transformed()
            or not torch.is_grad_enabled()
            or not given.requires_grad
            or given.layout is not torch.strided
        ):
            return as_pytorch(given)
        return function(as_pytorch, given, *args)  # type: ignore[no-any-return]

    return run


def _along(run: Run, given: Tensor, dim: int, keepdim: bool = False) -> Any:
    return _Prod.apply(run, given, dim, keepdim)  # type: ignore[no-untyped-call]


class Saving(torch.autograd.Function):
    """An operator run by PyTorch's own kernel, which saves its input and its output; `ctx.options` has the rest."""

    @staticmethod
    def forward(ctx: Any, run: Run, given: Tensor, *options: Any) -> Tensor:
        result = run(given)
        ctx.save_for_backward(given, result)
        ctx.run, ctx.options = run, options
        return result


class _Prod(Saving):
    """A product of all elements, or along a dimension."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        given = given.to(grad.dtype)
        if given.dim() == 0:
            return None, grad, None, None
        dim: Any  # None for all elements
        dim, keepdim = ctx.options or (None, True)
        gradient = _whole_gradient if dim is None else _gradient_along
        if not keepdim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        return None, gradient(grad, given, result, dim), None, None


def _whole_gradient(grad: Tensor, given: Tensor, result: Tensor, _: None) -> Tensor:
    zeros = _positions_of_zeros(given)
    if len(zeros) == 0:
        return grad * (result / given).conj()
    if len(zeros) > 1 and not torch.is_grad_enabled():
        return torch.zeros_like(given, memory_format=torch.contiguous_format)
    return _gradient_beside_zeros(grad, given.contiguous().view(-1), 0).view_as(given)


def _positions_of_zeros(given: Tensor) -> Tensor:
    is_zero = given == 0
    # PyTorch reads the length of `nonzero()`; where no value is known, a boolean can be guessed and a length can't.
    if is_zero.any().item():
        return is_zero.nonzero()
    return torch.empty((0, given.dim()), dtype=torch.long, device=given.device)


def _gradient_along(grad: Tensor, given: Tensor, result: Tensor, dim: int) -> Tensor:
    is_zero = given == 0
    zeros = is_zero.sum(dim, True)
    if not zeros.any().item():  # PyTorch reads the number of zeros, which differs from step to step
        return grad * (result / given).conj()
    return _gradient_beside_zeros(grad, given, dim % given.dim())


def _gradient_beside_zeros(grad: Tensor, given: Tensor, dim: int) -> Tensor:
    """Return the gradient, from the products of the elements before and after each element."""
    if given.numel() == 0:
        return grad.expand_as(given)
    size = given.shape[dim]
    if size == 1:
        return grad
    ones = torch.ones((*given.shape[:dim], 1, *given.shape[dim + 1 :]), dtype=grad.dtype, device=grad.device)
    of_before = torch.cat((ones, given.narrow(dim, 0, size - 1)), dim)
    before = of_before.cumprod(dim)
    reverse = given.narrow(dim, 1, size - 1).flip(dim)
    of_after = torch.cat((ones, reverse), dim)
    del ones, reverse
    after = of_after.cumprod(dim).flip(dim)
    return grad * (before * after).conj()


class _Cumprod(Saving):
    """A cumulative product along a dimension."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        grad = grad.to(given.dtype)
        (dim,) = ctx.options
        if given.numel() <= 1 or given.shape[dim] == 1:
            return None, grad, None
        return None, _cumulative_gradient(ctx.run, grad, given, result, dim), None


def _cumulative_gradient(run: Run, grad: Tensor, given: Tensor, result: Tensor, dim: int) -> Tensor:
    weighted = result.conj() * grad
    is_zero = given == 0
    if not is_zero.any().item():
        return _sums_from_here(weighted, dim).div(given.conj())
    if torch.is_grad_enabled():
        return torch.autograd.grad(run(given), given, grad, create_graph=True)[0]
    gradient = torch.zeros(given.shape, dtype=grad.dtype, device=grad.device)
    zeros = is_zero.cumsum(dim)
    is_before = zeros == 0
    before = _gradient_before_zeros(is_before, weighted, given.conj(), dim)
    gradient = torch.where(is_before, before, gradient)
    is_before = zeros == 1
    return _with_first_zeros(gradient, is_before, zeros, grad, given.conj(), result.conj(), dim)


def _sums_from_here(values: Tensor, dim: int) -> Tensor:
    """Return, for each element, the sum of itself and all elements after it."""
    flipped = values.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


def _gradient_before_zeros(is_before: Tensor, weighted: Tensor, given: Tensor, dim: int) -> Tensor:
    others = ~is_before
    filled = weighted.masked_fill(others, 0.0)
    return _sums_from_here(filled, dim).div_(given)


def _with_first_zeros(
    gradient: Tensor, is_between: Tensor, zeros: Tensor, grad: Tensor, given: Tensor, result: Tensor, dim: int
) -> Tensor:
    """Return a gradient with the entries of each line's first zero.

    Such an entry is the product of the factors before the zero, times a sum over the products that follow it.

    Args:
        gradient: The gradient of the other elements.
        is_between: Whether exactly one zero is at or before the element; is written to.
        zeros: The number of zeros at or before the element.
    """
    first = is_between.max(dim, keepdim=True)[1]
    is_first = torch.zeros_like(is_between).scatter_(dim, first, 1).logical_and_(is_between)
    is_between &= ~is_first
    products = _products_between(given, is_between, dim)
    counted = grad.masked_fill(zeros != 1, 0.0)
    before = _products_before(result, first, dim)
    sums = products.mul_(counted).sum(dim, keepdim=True)
    del products
    return torch.where(is_first, sums.mul_(before), gradient)


def _products_between(given: Tensor, is_between: Tensor, dim: int) -> Tensor:
    others = ~is_between
    filled = given.masked_fill(others, 1.0)
    return filled.cumprod(dim)


def _products_before(result: Tensor, first: Tensor, dim: int) -> Tensor:
    position = (first - 1).relu_()
    return result.gather(dim, position).masked_fill_(first == 0, 1.0)

"""Composite operators, run as they are without a dispatch mode.

Under a mode or a tensor subclass they avoid writing in place (`isTensorSubclassLike` in
ATen/TensorSubclassLikeUtils.h), and allocate tensors that a step without a mode never has.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memfit._torch import (
    DispatchKey,
    below_autograd,
    call_at,
    destroy_library,
    forward_ad_level,
    peek_interpreter_stack,
    replaced,
)
from memfit.foundations import has_this_turn, here

_aten = torch.ops.aten
_KEYS = ("AutogradCPU", "AutogradCUDA")

_registered: list[torch.library.Library] = []
"""The kernels of the contexts that are entered, of which the innermost alone are registered."""


@contextlib.contextmanager
def composites_without_mode() -> Iterator[None]:
    """Run composite operators as without a dispatch mode, until the context is left."""
    _registered.append(_library())
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    eager = nullcontext() if flex is None else replaced(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    try:
        with eager:  # it calls a compiler, which does not compile under modes
            yield
    finally:
        destroy_library(_registered.pop())


@contextlib.contextmanager
def composites_lifted() -> Iterator[None]:
    """Run composite operators as PyTorch does, until the context is left, as where a compiler takes them apart."""
    if not _registered:
        yield
        return
    destroy_library(_registered[-1])
    try:
        yield
    finally:
        _registered[-1] = _library()


def _library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key in _KEYS:
        for func, kernel in _COMPOSITES.items():
            library.impl(func, here(kernel, functools.partial(_as_composite, func)), key)
    own = [(key, name, function) for key in _KEYS for name, function in _OWN_BACKWARD.items()]
    own += [("AutogradCPU", name, _OrderStatistic.apply) for name in ("max", "min", "median", "nanmedian")]
    for key, name, function in own:
        pytorchs = torch.library.get_kernel(f"aten::{name}", key)
        library.impl(name, _with_own_backward(pytorchs, function), key, with_keyset=True)
    plain = functools.partial(_as_composite, _aten.max_pool1d.default)
    library.impl("max_pool1d", here(_max_pool1d, plain), "AutogradCPU")
    return library


def _as_composite(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return call_at(func, DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # type: ignore[no-any-return]


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias in place where it does not go into the product (`linear` in ATen/native/Linear.cpp)."""
    if bias is None or given.dim() == 2 or given.layout is not torch.strided or given.is_contiguous():
        return _as_composite(_aten.linear.default, given, weight, bias)
    product: Tensor = _aten.matmul.default(given, weight.t())
    return product.add_(bias)


def _max_pool1d(given: Tensor, *window: Any) -> Tensor:
    """Make no indices where no gradient is asked for (`max_pool1d` in ATen/native/MaxPooling.cpp)."""
    if (torch.is_grad_enabled() and given.requires_grad) or given.is_quantized:
        return _as_composite(_aten.max_pool1d.default, given, *window)
    with below_autograd():
        return _aten.max_pool1d.default(given, *window)  # type: ignore[no-any-return]


def _one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
    """Fill zeros in place, where fake tensors compare (`one_hot` in ATen/native/Onehot.cpp); checks are left out."""
    is_counted = num_classes == -1  # else PyTorch has an error of its own for what is not positive
    if (num_classes < 1 and not is_counted) or classes.numel() == 0 or classes.dtype is not torch.long:
        return _as_composite(_aten.one_hot.default, classes, num_classes)
    num_classes = int(classes.max().item()) + 1 if is_counted else num_classes
    zeros = torch.zeros((*classes.shape, num_classes), dtype=classes.dtype, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


def _without_vectors(func: Any, values: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a kernel that makes no singular vectors or eigenvectors where no gradient is asked for.

    Nor where no derivative is (`_may_require_fw_or_bw_grad` in ATen/native/BatchLinearAlgebra.cpp).
    """

    def kernel(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _is_transformed() or (torch.is_grad_enabled() and given.requires_grad):
            return _as_composite(func, given, *args, **kwargs)
        return values(given, *args, **kwargs)  # type: ignore[no-any-return]

    return kernel


_COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    _aten.linear.default: _linear,
    _aten.one_hot.default: _one_hot,
    **{
        func: _without_vectors(func, values)
        for func, values in (
            (_aten.linalg_svdvals.default, lambda x, driver=None: _aten._linalg_svd(x, False, False, driver=driver)[1]),
            (_aten.linalg_eigvalsh.default, lambda x, triangle="L": _aten._linalg_eigh(x, triangle, False)[0]),
            (_aten.linalg_eigvals.default, _aten._linalg_eigvals.default),
        )
    },
}


# Operators with a backward pass of their own, run as PyTorch's formulas run without a mode. Temporary tensors have
# names where C++ keeps them to the end of a statement, and Python would not.


def _is_transformed() -> bool:
    """Tell whether `torch.func` or forward-mode differentiation is under way."""
    return peek_interpreter_stack() is not None or forward_ad_level() >= 0


def _with_own_backward(kernel: Any, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a kernel that computes as another, with a backward pass of its own.

    Under `torch.func` and forward-mode differentiation, and in threads that capture nothing, the other kernel runs.
    `function` gets a function that runs it, and the operator's arguments.
    """
    has_it = has_this_turn()

    def run(keys: Any, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def as_pytorch(given: Tensor) -> Tensor:
            return kernel.call_boxed(keys, given, *args, **kwargs)  # type: ignore[no-any-return]

        is_plain = has_it() and not _is_transformed() and given.layout is torch.strided
        if is_plain and torch.is_grad_enabled() and given.requires_grad:
            return function(as_pytorch, given, *args)  # type: ignore[no-any-return]
        return as_pytorch(given)

    return run


class _OwnBackward(torch.autograd.Function):
    """An operator run by PyTorch's own kernel, which saves its input and its output; `ctx.options` has the rest.

    `ctx.run` runs the kernel, with its own backward formula.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], given: Tensor, *options: Any) -> Tensor:
        result = run(given)
        ctx.save_for_backward(given, *(option for option in options if isinstance(option, Tensor)), result)
        ctx.run, ctx.options = run, [option for option in options if not isinstance(option, Tensor)]
        return result


class _OrderStatistic(_OwnBackward):
    """`max`, `min` and medians of all elements, whose backward passes differ without a mode on the CPU.

    There they read whether the result is NaN, and fill the gradient in place (`evenly_distribute_backward` in
    torch/csrc/autograd/FunctionsManual.cpp); under a mode they do neither. Here no result is taken to be NaN.
    """

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        is_one = given == result
        zeros = grad.new_zeros(given.shape)
        return None, zeros.masked_fill_(is_one, grad / is_one.sum())


# The backward passes of `prod` and `cumprod` read whether an element is 0, and take a leaner formula where none is;
# under a mode they always take the formula for zeros (`prod_backward` and `cumprod_backward` in
# torch/csrc/autograd/FunctionsManual.cpp).


class _Prod(_OwnBackward):
    """A product of all elements, or along a dimension."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        given = given.to(grad.dtype)
        if given.dim() == 0:
            return None, grad, None, None
        if not ctx.options:
            is_zero = given == 0
            # PyTorch reads the length of `nonzero()`; where no value is known, a boolean can be guessed, no length.
            has_zeros = is_zero.any().item()
            zeros = (
                is_zero.nonzero() if has_zeros else torch.empty((0, given.dim()), dtype=torch.long, device=given.device)
            )
            del is_zero
            if len(zeros) == 0:
                return None, grad * (result / given).conj(), None, None
            if len(zeros) > 1 and not torch.is_grad_enabled():
                return None, torch.zeros_like(given, memory_format=torch.contiguous_format), None, None
            return None, _gradient_beside_zeros(grad, given.contiguous().view(-1), 0).view_as(given), None, None
        dim, keepdim = ctx.options
        if not keepdim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        is_zero = given == 0
        zeros = is_zero.sum(dim, True)
        if not zeros.any().item():  # PyTorch reads the number of zeros, which differs from step to step
            return None, grad * (result / given).conj(), None, None
        return None, _gradient_beside_zeros(grad, given, dim % given.dim()), None, None


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


class _Cumprod(_OwnBackward):
    """A cumulative product along a dimension."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, result = ctx.saved_tensors
        grad = grad.to(given.dtype)
        (dim,) = ctx.options
        if given.numel() <= 1 or given.shape[dim] == 1:
            return None, grad, None
        weighted = result.conj() * grad
        is_zero = given == 0
        if not is_zero.any().item():
            return None, _sums_from_here(weighted, dim).div(given.conj()), None
        if torch.is_grad_enabled():
            return None, torch.autograd.grad(ctx.run(given), given, grad, create_graph=True)[0], None
        gradient = torch.zeros(given.shape, dtype=grad.dtype, device=grad.device)
        zeros = is_zero.cumsum(dim)
        chosen = zeros == 0
        factors = given.conj()
        others = ~chosen
        filled = weighted.masked_fill(others, 0.0)
        before = _sums_from_here(filled, dim).div_(factors)
        del factors, others, filled
        gradient = torch.where(chosen, before, gradient)
        # The entry of each line's first zero: the product of the factors before it, times a sum over the products that
        # follow it, up to the second one.
        chosen = zeros == 1
        given, result = given.conj(), result.conj()
        first = chosen.max(dim, keepdim=True)[1]
        is_first = torch.zeros_like(chosen).scatter_(dim, first, 1).logical_and_(chosen)
        chosen &= ~is_first
        others = ~chosen
        filled = given.masked_fill(others, 1.0)
        products = filled.cumprod(dim)
        del others, filled
        counted = grad.masked_fill(zeros != 1, 0.0)
        position = (first - 1).relu_()
        factor = result.gather(dim, position).masked_fill_(first == 0, 1.0)
        del position
        sums = products.mul_(counted).sum(dim, keepdim=True)
        del products
        return None, torch.where(is_first, sums.mul_(factor), gradient), None


def _sums_from_here(values: Tensor, dim: int) -> Tensor:
    """Return, for each element, the sum of itself and all elements after it."""
    flipped = values.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


# The backward pass of `linalg.householder_product` writes the gradient of each reflector into one tensor; under a mode
# it makes a list of them, which it joins (`householder_product_backward` in torch/csrc/autograd/FunctionsManual.cpp).


class _HouseholderProduct(_OwnBackward):
    """A product of reflectors."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, tau, result = ctx.saved_tensors
        if torch.is_grad_enabled():  # what is differentiated again is never written to
            inputs = (given, tau) if tau.requires_grad else (given,)
            found = torch.autograd.grad(ctx.run(given), inputs, grad, create_graph=True)
            return None, found[0], found[1] if tau.requires_grad else None
        count = tau.shape[-1]
        if 0 in (given.numel(), count):
            return None, torch.zeros_like(given), torch.zeros_like(tau)
        vectors = given.tril(-1)
        vectors.diagonal(0, -2, -1).fill_(1.0)
        used = vectors.narrow(-1, 0, count)
        squared = (used * used.conj()).sum(-2)
        inverse = tau / (tau * squared - 1.0)  # factors of the reflectors' inverses
        del used, squared
        inner = result.matmul(grad.mH)
        _reflect_rows(inner, vectors, inverse, 0)
        of_given, of_tau = torch.zeros_like(given), torch.zeros_like(tau)
        for k in range(count):
            of_vector, of_factor = _gradients(inner, vectors, tau, k)
            of_given.select(-1, k).copy_(of_vector)
            of_tau.select(-1, k).copy_(of_factor)
            if k + 1 < count:
                _reflect_rows(inner, vectors, inverse, k + 1)
                _reflect_columns(inner, vectors, tau, k)
            del of_vector, of_factor
        return None, of_given.tril_(-1), of_tau


def _part(values: Tensor, dim: int, k: int) -> Tensor:
    return values.narrow(dim, k, values.shape[dim] - k)


def _vector(vectors: Tensor, k: int) -> Tensor:
    """Return reflector `k`, which is 0 before its place `k`: of shape (..., m - k, 1)."""
    return _part(vectors.narrow(-1, k, 1), -2, k)


def _reflect_rows(inner: Tensor, vectors: Tensor, factors: Tensor, k: int) -> None:
    v, rows = _vector(vectors, k), _part(inner, -2, k)
    projected = v.mH.matmul(rows)
    scaled = factors.narrow(-1, k, 1).unsqueeze(-1) * v
    rows.sub_(scaled * projected)


def _reflect_columns(inner: Tensor, vectors: Tensor, factors: Tensor, k: int) -> None:
    v, columns = _vector(vectors, k), _part(inner, -1, k)
    scaled = factors.narrow(-1, k, 1).unsqueeze(-1) * v
    projected = columns.matmul(scaled)
    columns.sub_(projected * v.mH)


def _gradients(inner: Tensor, vectors: Tensor, tau: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of a reflector and of its factor."""
    v, factor = _vector(vectors, k), tau.narrow(-1, k, 1).unsqueeze(-1)
    left = v.mH.matmul(_part(inner, -2, k))
    right = _part(inner, -1, k).matmul(v)
    of_vector = (-factor * left.conj()).squeeze(-2) - (factor.conj() * right).squeeze(-1)
    of_factor = -left.narrow(-1, k, v.shape[-2]).matmul(v).conj()
    return of_vector, of_factor.flatten(-2).squeeze(-1)


_OWN_BACKWARD: dict[str, Callable[..., Any]] = {
    "prod": _Prod.apply,
    "prod.dim_int": lambda run, given, dim, keepdim=False: _Prod.apply(  # type: ignore[no-untyped-call]
        run, given, dim, keepdim
    ),
    "cumprod": _Cumprod.apply,
    "linalg_householder_product": _HouseholderProduct.apply,
}

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

from memfit._torch.dispatch import DispatchKey, below_autograd
from memfit._torch.operators import call_at, destroy_library
from memfit._torch.replacement import replaced
from memfit.capture.products import Saving, is_transformed, register, register_products
from memfit.capture.reflectors import HouseholderProduct
from memfit.turns import here

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
        register_products(library, key)
        register(library, key, {"linalg_householder_product": HouseholderProduct.apply})
    register(library, "AutogradCPU", dict.fromkeys(("max", "min", "median", "nanmedian"), _Extreme.apply))
    plain = functools.partial(_as_composite, _aten.max_pool1d.default)
    library.impl("max_pool1d", here(_max_pool1d, plain), "AutogradCPU")
    return library


def _as_composite(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return call_at(func, DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # type: ignore[no-any-return]


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias in place where it does not go into the product (`linear` in ATen/native/Linear.cpp)."""
    if bias is None or given.dim() == 2 or given.layout is not torch.strided or given.is_contiguous():
        return _as_composite(_aten.linear.default, given, weight, bias)
    product: torch.Tensor = _aten.matmul.default(given, weight.t())
    return product.add_(bias)


def _max_pool1d(given: torch.Tensor, *window: Any) -> torch.Tensor:
    """Make no indices where no gradient is asked for (`max_pool1d` in ATen/native/MaxPooling.cpp)."""
    if (torch.is_grad_enabled() and given.requires_grad) or given.is_quantized:
        return _as_composite(_aten.max_pool1d.default, given, *window)
    with below_autograd():
        return _aten.max_pool1d.default(given, *window)  # type: ignore[no-any-return]


def _one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Fill zeros in place, where fake tensors compare (`one_hot` in ATen/native/Onehot.cpp); checks are left out."""
    is_counted = num_classes == -1  # else PyTorch has an error of its own for what is not positive
    if (num_classes < 1 and not is_counted) or classes.numel() == 0 or classes.dtype is not torch.long:
        return _as_composite(_aten.one_hot.default, classes, num_classes)
    num_classes = int(classes.max().item()) + 1 if is_counted else num_classes
    zeros = torch.zeros((*classes.shape, num_classes), dtype=classes.dtype, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)


def _is_differentiated(given: torch.Tensor) -> bool:
    """Tell whether a gradient or a derivative is asked for (`_may_require_fw_or_bw_grad` in BatchLinearAlgebra.cpp)."""
    return is_transformed() or (torch.is_grad_enabled() and given.requires_grad)


def _singular_values(given: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    """Make no singular vectors where no gradient is asked for, as the next two make no eigenvectors."""
    if _is_differentiated(given):
        return _as_composite(_aten.linalg_svdvals.default, given, driver=driver)
    return _aten._linalg_svd.default(given, False, False, driver=driver)[1]  # type: ignore[no-any-return]


def _symmetric_eigenvalues(given: torch.Tensor, triangle: str = "L") -> torch.Tensor:
    if _is_differentiated(given):
        return _as_composite(_aten.linalg_eigvalsh.default, given, triangle)
    return _aten._linalg_eigh.default(given, triangle, False)[0]  # type: ignore[no-any-return]


def _eigenvalues(given: torch.Tensor) -> torch.Tensor:
    if _is_differentiated(given):
        return _as_composite(_aten.linalg_eigvals.default, given)
    return _aten._linalg_eigvals.default(given)  # type: ignore[no-any-return]


_COMPOSITES: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.linear.default: _linear,
    _aten.one_hot.default: _one_hot,
    _aten.linalg_svdvals.default: _singular_values,
    _aten.linalg_eigvalsh.default: _symmetric_eigenvalues,
    _aten.linalg_eigvals.default: _eigenvalues,
}


class _Extreme(Saving):
    """`max`, `min` and medians of all elements, whose backward passes differ without a mode on the CPU.

    There they read whether the result is NaN, and fill the gradient in place (`evenly_distribute_backward` in
    torch/csrc/autograd/FunctionsManual.cpp); under a mode they do neither. Here no result is taken to be NaN.
    """

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given, result = ctx.saved_tensors
        is_one = given == result
        zeros = grad.new_zeros(given.shape)
        return None, zeros.masked_fill_(is_one, grad / is_one.sum())

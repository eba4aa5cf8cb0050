"""Operators composed of others that take another way while a mode looks on, made to take the one of a step without it.

Under a dispatch mode or a tensor subclass, operators composed of others avoid writing in place (`isTensorSubclassLike`
in ATen/TensorSubclassLikeUtils.h), and allocate what a step without a mode never has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memfit.capture.extremes import filled_as_without_a_mode
from memfit.capture.products import read_as_without_a_mode

_aten = torch.ops.aten
_KEYS = ("AutogradCPU", "AutogradCUDA")


@contextlib.contextmanager
def composed_as_without_a_mode() -> Iterator[None]:
    """Have operators composed of others run as they do where no mode looks on, until the context is left."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in _KEYS:
            library.impl("linear", _linear, key)
            library.impl("one_hot", _one_hot, key)
            read_as_without_a_mode(library, key)
        filled_as_without_a_mode(library)
        library.impl("max_pool1d", _max_pool1d, "AutogradCPU")
        yield
    finally:
        library._destroy()


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias in place where it does not go into the product (`linear` in ATen/native/Linear.cpp)."""
    if bias is None or given.dim() == 2 or given.layout is not torch.strided or given.is_contiguous():
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.linear.default._op_dk(composite, given, weight, bias)  # type: ignore[no-any-return]
    product: torch.Tensor = _aten.matmul.default(given, weight.t())
    return product.add_(bias)


def _max_pool1d(given: torch.Tensor, *window: Any) -> torch.Tensor:
    """Make no indices where no gradient is asked for (`max_pool1d` in ATen/native/MaxPooling.cpp)."""
    if (torch.is_grad_enabled() and given.requires_grad) or given.is_quantized:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.max_pool1d.default._op_dk(composite, given, *window)  # type: ignore[no-any-return]
    with torch._C._AutoDispatchBelowAutograd():
        return _aten.max_pool1d.default(given, *window)  # type: ignore[no-any-return]


def _one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Fill zeros in place, where fake tensors compare (`one_hot` in ATen/native/Onehot.cpp); checks are left out."""
    if num_classes < 1 or classes.numel() == 0 or classes.dtype is not torch.long:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return _aten.one_hot.default._op_dk(composite, classes, num_classes)  # type: ignore[no-any-return]
    zeros = torch.zeros((*classes.shape, num_classes), dtype=classes.dtype, device=classes.device)
    return zeros.scatter_(-1, classes.unsqueeze(-1), 1)

"""Storages, versions and parts of tensors."""

import operator
from collections.abc import Callable
from typing import Any

import torch

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The address of a storage's own record, the same for every tensor that aliases it; fake storages have one too."""


def storage_key_of(tensor: torch.Tensor) -> int:
    """Return the key of a strided tensor's storage."""
    return storage_key(tensor.untyped_storage())


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The version counter: how often a tensor, or an alias of it, was changed in place."""

# PyTorch's own method, not wrapped: the frame of a wrapper would hold one more reference to the tensor.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""The number of C++'s references to a tensor."""

nnz: Callable[[torch.Tensor], int] = torch.Tensor._nnz
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._indices
sparse_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
nested_sizes: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._nested_tensor_size
is_zerotensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

"""Sparse and nested tensors by their parts: the dense tensors that hold indices and values, and so the memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds its memory itself: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory: itself, a nested one's values, or a sparse one's indices and values.

    They are views of what the tensor holds; no mode sees them made. None for layouts whose memory can't be reached.
    """
    if is_dense(tensor):
        return [tensor]
    with _disable_current_modes(), torch.no_grad():
        return _sparse_parts(tensor)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def spread_indices(shape: list[int], nnz: int) -> torch.Tensor:
    """Return indices of as many entries of a sparse tensor, in order; entries repeat only where there are more.

    Args:
        shape: Of the sparse dimensions.
        nnz: How many (≥ 0).
    """
    entries = max(1, math.prod(shape))
    flat = torch.arange(nnz) * entries // nnz if nnz <= entries else torch.arange(nnz) % entries
    return torch.stack(torch.unravel_index(flat, shape)) if shape else torch.zeros(0, nnz, dtype=torch.int64)


def describe(tensor: torch.Tensor) -> list[Any]:
    """Return what a sparse COO tensor is like, as JSON values: dtype, shape, sparse dimensions, entries, coalesced."""
    with _disable_current_modes():
        sparse_dims, nnz, coalesced = tensor.sparse_dim(), tensor._nnz(), tensor.is_coalesced()
    return [str(tensor.dtype)[6:], list(tensor.shape), sparse_dims, nnz, coalesced]


def describe_nested(tensor: torch.Tensor) -> list[Any]:
    """Return a description of a nested tensor, as JSON values: its dtype, and the shape of each of its tensors."""
    with _disable_current_modes():
        return [str(tensor.dtype)[6:], tensor._nested_tensor_size().tolist()]


def rebuild_nested(description: list[Any], device: str) -> torch.Tensor:
    """Return a nested tensor like the one described, whose floating-point values are 0.5 and others zero."""
    dtype, shapes = description
    kind = getattr(torch, dtype)
    fill = 0.5 if kind.is_floating_point else 0
    made = [torch.full(shape, fill, dtype=kind, device=device) for shape in shapes]
    return torch.nested.nested_tensor(made, dtype=kind, device=device)


def rebuild(description: list[Any], device: str) -> torch.Tensor:
    """Return a sparse COO tensor like the one described, whose floating-point values are 0.5 and others zero."""
    dtype, shape, sparse_dims, nnz, coalesced = description
    kind = getattr(torch, dtype)
    values = torch.full((nnz, *shape[sparse_dims:]), 0.5 if kind.is_floating_point else 0, dtype=kind, device=device)
    indices = spread_indices(shape[:sparse_dims], nnz).to(device)
    return assembled(indices, values, shape, coalesced)


def assembled(indices: torch.Tensor, values: torch.Tensor, shape: Any, coalesced: bool) -> torch.Tensor:
    """Return the sparse COO tensor of indices and values, which it holds as they are."""
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)

"""Sparse, nested and wrapping tensors by their parts: the dense tensors that hold the memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from memfit._torch import (
    disable_current_modes,
    inner_tensors,
    is_wrapper,
    nested_sizes,
    nnz,
    sparse_indices,
    sparse_values,
)
from memfit.workload.argument_values import drawn

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is neither sparse, nested nor a wrapper of others, and so holds its memory itself."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper(type(tensor))


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's memory: itself, its nested or sparse parts, or those that it wraps.

    They are views, created without dispatch modes; none for layouts whose memory can't be accessed.
    """
    if is_dense(tensor):
        return [tensor]
    if is_wrapper(type(tensor)):  # quantised weights, and a rank's part of a DTensor
        return [part for inner in inner_tensors(tensor).values() for part in parts(inner)]
    with disable_current_modes(), torch.no_grad():
        return _sparse_parts(tensor)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [sparse_indices(tensor), sparse_values(tensor)]
    if tensor.layout in _COMPRESSED_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def spread_indices(shape: list[int], nnz: int) -> torch.Tensor:
    """Return ordered indices for a number of entries of a sparse tensor, which repeat only if there are too many.

    Args:
        shape: Sizes of the sparse dimensions.
        nnz: Number of entries (≥ 0).
    """
    entries = max(1, math.prod(shape))
    flat = torch.arange(nnz) * entries // nnz if nnz <= entries else torch.arange(nnz) % entries
    return torch.stack(torch.unravel_index(flat, shape)) if shape else torch.zeros(0, nnz, dtype=torch.int64)


def describe(tensor: torch.Tensor) -> list[Any]:
    """Return a sparse COO tensor's description as JSON values: dtype, shape, sparse dimensions, entries, coalesced."""
    with disable_current_modes():
        sparse_dims, entries, coalesced = tensor.sparse_dim(), nnz(tensor), tensor.is_coalesced()
    return [str(tensor.dtype)[6:], list(tensor.shape), sparse_dims, entries, coalesced]


def describe_nested(tensor: torch.Tensor) -> list[Any]:
    """Return a description of a nested tensor as JSON values: its dtype, and the shape of each inner tensor."""
    with disable_current_modes():
        return [str(tensor.dtype)[6:], nested_sizes(tensor).tolist()]


def rebuild_nested(description: list[Any], device: str) -> torch.Tensor:
    """Return a nested tensor by its description, with the values of `argument_values`."""
    dtype, shapes = description
    kind = getattr(torch, dtype)
    tensors = [drawn(shape, kind, device) for shape in shapes]
    return torch.nested.nested_tensor(tensors, dtype=kind, device=device)


def rebuild(description: list[Any], device: str) -> torch.Tensor:
    """Return a sparse COO tensor by its description, with the values of `argument_values`."""
    dtype, shape, sparse_dims, nnz, coalesced = description
    kind = getattr(torch, dtype)
    values = drawn((nnz, *shape[sparse_dims:]), kind, device)
    indices = spread_indices(shape[:sparse_dims], nnz).to(device)
    return assembled(indices, values, shape, coalesced)


def assembled(indices: torch.Tensor, values: torch.Tensor, shape: Any, coalesced: bool) -> torch.Tensor:
    """Return the sparse COO tensor of indices and values, without copying them."""
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)

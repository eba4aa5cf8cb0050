"""The values of rebuilt arguments, on which the time of an operator depends.

Floating-point tensors hold numbers between 0 and 1, drawn once: probabilities, logarithms and roots are fine. Equal
numbers would make pooling three times and sorting four times as fast as in a step, and products on a GPU, whose clock
depends on what its wires switch. Indices are spread over what they index: lookups of one row would all be in the
caches, and sums into one place would wait for each other. Groups of grouped products and bags of embeddings are equally
large, masks select as many places as there are values to write, and matrices of linear algebra are regular. Others are
zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from memfit._torch import disable_current_modes, nnz, schema_of

_aten = torch.ops.aten
TO_SPARSE = (_aten._to_sparse.default, _aten._to_sparse.sparse_dim)
"""Operators that make a dense tensor sparse; the COO layout alone is followed."""
_SOLVING = (".linalg", "_linalg", "cholesky", "triangular", ".lu_")
"""Parts of the names of operators that fail, or loop for long, on singular matrices."""
_INTEGERS = (torch.int64, torch.int32)
_DRAWN = 1_048_573  # numbers, then they repeat: a prime, so that no two rows of a matrix are alike
_LEAST, _MOST = 0.05, 0.93  # in formats of 8 bits too, neither 0 nor 1


def drawn(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Return a contiguous tensor of numbers between 0 and 1, the same each time; of zeros for other dtypes."""
    values = torch.zeros(list(shape), dtype=dtype, device=device)
    if not dtype.is_floating_point or values.device.type == "meta":
        return values
    flat = values.view(-1)
    numbers = torch.from_numpy(_numbers())[: flat.numel()].to(device)
    for start in range(0, flat.numel(), _DRAWN):
        part = flat[start : start + _DRAWN]
        part.copy_(numbers[: part.numel()])
    return values


@functools.cache
def _numbers() -> Any:
    return numpy.random.default_rng(0).uniform(_LEAST, _MOST, _DRAWN).astype(numpy.float32)


def set_values(func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Set the values of a call's arguments that the operator needs, or that its time depends on; meta tensors stay."""
    name = str(func)
    if "grouped_mm" in name:
        _spread_groups(args)
    arguments = {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    if "embedding_bag" in name and "backward" in name:  # the gradient of a maximum selects the bags that are not empty
        sizes, indices = arguments.get("bag_size"), arguments.get("indices")
        if isinstance(sizes, torch.Tensor) and isinstance(indices, torch.Tensor) and sizes.numel():
            sizes.fill_(max(1, indices.numel() // sizes.numel()))
    if "ctc_loss" in name:
        if "backward" in name:  # which writes as many scores as the forward pass made room for
            _spread_labels(args[1:5], (args[6].shape[-1] - 1) // 2)
        else:
            _spread_labels(args[:4])
    if "pack_padded_sequence" in name and "backward" not in name and arguments["lengths"].device.type != "meta":
        arguments["lengths"].fill_(arguments["input"].shape[1 if arguments["batch_first"] else 0])
    if "index_put" in name:
        for at, mask in _masks(arguments["indices"]):  # it selects as many places as there are values to write
            if arguments["values"].dim() == arguments["self"].dim() - mask.dim() + 1:
                _select(mask, arguments["values"].shape[at])
    if any(part in name for part in _SOLVING) and "check_errors" not in name:  # codes of errors, of which 0 is none
        _make_regular([*args, *kwargs.values()])
    if "segment_reduce" in name:
        _fill_segments(arguments)
    for indices, count in _indices_of(name, arguments):
        if indices.device.type != "meta":
            _spread(indices, count)


def selected_by(func: Any, args: Any, out: Any) -> int | None:
    """Return how many elements a call selected by their values; None for one that selects none."""
    if func in TO_SPARSE and args[0].layout is torch.strided and out.layout is torch.sparse_coo:
        with disable_current_modes():
            return nnz(out)
    if func is _aten.nonzero.default:
        return int(out.shape[0])
    if func is _aten.masked_select.default:
        return int(out.numel())
    masks = _masks(args[1]) if func is _aten.index.Tensor else []
    return int(out.shape[masks[0][0]]) if len(masks) == 1 else None


def sparse_dims_of(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of sparse dimensions of the tensor that a call of `TO_SPARSE` makes."""
    if func is _aten._to_sparse.sparse_dim:
        return int(args[1])
    return int(args[0].dim() - (kwargs.get("dense_dim") or 0))


def select(func: Any, args: list[Any], kwargs: dict[str, Any], count: int) -> None:
    """Set the values of a call's arguments so that it selects a number of elements."""
    if func is _aten.masked_select.default:
        places = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
        _select(args[1], -(-count * args[1].numel() // max(1, places)))
    elif func is _aten.index.Tensor:
        _select(_masks(args[1])[0][1], count)
    else:
        _select(args[0], count, sparse_dims_of(func, args, kwargs) if func in TO_SPARSE else None)


def _select(tensor: torch.Tensor, count: int, dims: int | None = None) -> None:
    """Fill a tensor with ones at its first places, and with zeros elsewhere; by its first dimensions, or all."""
    if 0 in tensor.stride():  # places share memory
        return
    shape = tensor.shape[:dims]
    places = torch.arange(math.prod(shape), device=tensor.device).view(shape)
    tensor.copy_((places < count).view(*shape, *[1] * (tensor.dim() - len(shape))).expand(tensor.shape))


def _masks(indices: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the mask among indices with its position, where it is the only index."""
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    return given if len(given) == 1 and given[0][1].dtype is torch.bool else []


def _indices_of(name: str, arguments: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the indices among a call's arguments, and how many places each may name."""
    own, weight, index, indices = (arguments.get(each) for each in ("self", "weight", "index", "indices"))
    found: list[tuple[Any, int]] = []
    if isinstance(index, torch.Tensor) and isinstance(own, torch.Tensor) and own.dim() and "dim" in arguments:
        found = [(index, own.shape[arguments["dim"]])]
    elif isinstance(indices, list) and isinstance(own, torch.Tensor):
        found = _of_dimensions(own, indices)
    elif "pool" in name and isinstance(own, torch.Tensor):
        found = [(indices, math.prod(own.shape[-3 if "pool3d" in name else -2 :]))]
    elif "num_weights" in arguments:
        found = [(indices, arguments["num_weights"])]
    elif "embedding" in name and isinstance(weight, torch.Tensor):
        found = [(indices, weight.shape[0])]
    return [(i, count) for i, count in found if isinstance(i, torch.Tensor) and i.dtype in _INTEGERS and count > 1]


def _of_dimensions(indexed: torch.Tensor, indices: list[Any]) -> list[tuple[Any, int]]:
    """Return the indices of each dimension; a mask stands for as many dimensions as it has."""
    found, dim = list[tuple[Any, int]](), 0
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if not is_mask and dim < indexed.dim():
            found.append((index, indexed.shape[dim]))
        dim += index.dim() if is_mask else 1
    return found


def _spread(indices: torch.Tensor, count: int) -> None:
    """Give indices values that are spread over a number of places."""
    if not indices.numel():
        return
    elements = 1 + sum((n - 1) * s for n, s in zip(indices.shape, indices.stride(), strict=True))
    shares = drawn([elements], torch.float32, indices.device)
    places = shares.sub_(_LEAST).mul_(count / (_MOST - _LEAST)).to(indices.dtype).clamp_(0, count - 1)
    indices.as_strided((elements,), (1,)).copy_(places)  # where it is expanded too


def _make_regular(arguments: list[Any]) -> None:
    """Make square matrices positive definite, and pivots the identity, so that systems can be solved."""
    for tensor in (a for a in arguments if isinstance(a, torch.Tensor) and 0 not in a.shape and 0 not in a.stride()):
        if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and tensor.is_floating_point():
            tensor.diagonal(dim1=-2, dim2=-1).add_(tensor.shape[-1])
        elif tensor.dim() and tensor.dtype is torch.int32:
            tensor.copy_(torch.arange(1, tensor.shape[-1] + 1, device=tensor.device).expand(tensor.shape))


def _spread_labels(args: list[Any], most: int = 2**31) -> None:
    """Give the sequences of a CTC loss their maximal length, and equally many labels, at most some."""
    scores, labels, lengths, counts = args
    if isinstance(lengths, torch.Tensor) and isinstance(counts, torch.Tensor):
        lengths.fill_(scores.shape[0])
        ends = torch.arange(counts.numel() + 1) * labels.numel() // max(1, counts.numel())
        counts.copy_(ends.diff().clamp_(max=most))


def _fill_segments(arguments: dict[str, Any]) -> None:
    """Make segments equally long, by their lengths or their offsets."""
    axis = arguments.get("axis", 0)
    count = arguments["data"].shape[axis]
    for name, first in (("lengths", 1), ("offsets", 0)):
        marks = arguments.get(name)
        if isinstance(marks, torch.Tensor) and marks.numel() and marks.device.type != "meta":
            segments = marks.shape[axis] - 1 + first
            ends = torch.arange(segments + 1, device=marks.device) * count // max(1, segments)
            marks.copy_((ends.diff() if first else ends).to(marks.dtype))


def _spread_groups(args: list[Any]) -> None:
    """Make the groups of a grouped matrix product equally large, by their offsets."""
    left, right, ends = args[:3]
    if isinstance(ends, torch.Tensor):
        total = right.shape[-1] if left.dim() == 3 else left.shape[0 if right.dim() == 3 else -1]
        groups = torch.arange(1, ends.numel() + 1, device=ends.device)
        args[2] = (groups * total // ends.numel()).to(ends.dtype)

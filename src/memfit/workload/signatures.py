"""Operator calls as text: the operator, with a description of its arguments that suffices to call it again.

`capture` records calls with `signature`, and `cost` runs them with `rebuild`. Sparse, nested and wrapping tensors are
described by their parts, the dense tensors that hold the memory.

[Values of arguments] The time of an operator depends on them. Floating-point tensors hold numbers between 0 and 1,
drawn once: probabilities, logarithms and roots are fine. Equal numbers would make pooling three times and sorting four
times as fast as in a step, and products on a GPU, whose clock depends on what its wires switch. Indices are spread over
what they index: lookups of one row would all be in the caches, and sums into one place would wait for each other.
Groups of grouped products and bags of embeddings are equally large, masks select as many places as there are values to
write, and matrices of linear algebra are regular. Others are zeros.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from memfit._torch import (
    disable_current_modes,
    inner_tensors,
    is_wrapper,
    nested_sizes,
    nnz,
    schema_of,
    sparse_indices,
    sparse_values,
)

_aten = torch.ops.aten
TO_SPARSE = (_aten._to_sparse.default, _aten._to_sparse.sparse_dim)
"""Operators that make a dense tensor sparse; the COO layout alone is followed."""
_ASKING = ("aten.mkldnn_rnn_layer.default",)
"""Operators whose kernels are others where no gradients are recorded, as in reentrant checkpointing."""
_SOLVING = (".linalg", "_linalg", "cholesky", "triangular", ".lu_")
"""Parts of the names of operators that fail, or loop for long, on singular matrices."""
_DRAWN = 1_048_573  # numbers, then they repeat: a prime, so that no two rows of a matrix are alike
_LEAST, _MOST = 0.05, 0.93  # in formats of 8 bits too, neither 0 nor 1


# Parts of tensors


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
        if tensor.layout is torch.strided:
            return [tensor.values()]
        if tensor.layout is torch.sparse_coo:
            return [sparse_indices(tensor), sparse_values(tensor)]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return []


def spread_indices(shape: list[int], nnz: int) -> torch.Tensor:
    """Return ordered indices of `nnz` entries in some sparse dimensions, which repeat only if there are too many."""
    entries = max(1, math.prod(shape))
    flat = torch.arange(nnz) * entries // nnz if nnz <= entries else torch.arange(nnz) % entries
    return torch.stack(torch.unravel_index(flat, shape)) if shape else torch.zeros(0, nnz, dtype=torch.int64)


def assembled(indices: torch.Tensor, values: torch.Tensor, shape: Any, coalesced: bool) -> torch.Tensor:
    """Return the sparse COO tensor of indices and values, without copying them."""
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


# Calls as text


def describe(argument: Any) -> Any:
    """Return an argument as JSON values; tensors by dtype, shape and stride, sparse ones by number of entries.

    Raises:
        TypeError: The argument is of a kind that has no description.
    """
    if isinstance(argument, torch.Tensor):
        dtype = str(argument.dtype)[6:]
        if argument.layout is torch.sparse_coo:
            with disable_current_modes():
                sparse_dims, entries, coalesced = argument.sparse_dim(), nnz(argument), argument.is_coalesced()
            return {"s": [dtype, list(argument.shape), sparse_dims, entries, coalesced]}
        if argument.layout is torch.strided and argument.is_nested:
            with disable_current_modes():
                return {"n": [dtype, nested_sizes(argument).tolist()]}
        return {"t": [dtype, list(argument.shape), list(argument.stride())]}
    if argument is None or isinstance(argument, bool | int | str):
        return argument
    if isinstance(argument, float):
        return float(f"{argument:.0e}") if math.isfinite(argument) else {"f": str(argument)}
    if isinstance(argument, complex):
        return {"c": [describe(argument.real), describe(argument.imag)]}
    if isinstance(argument, list | tuple):
        return {"l": [describe(a) for a in argument]}
    if isinstance(argument, torch.device):
        return {"device": argument.type}
    if isinstance(argument, torch.Generator):
        return None
    for kind in (torch.dtype, torch.memory_format, torch.layout):
        if isinstance(argument, kind):
            return {kind.__name__: str(argument)[6:]}
    raise TypeError(f"can't describe an argument of type {type(argument).__name__}")


def signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the text of a call. Calls with equal texts cost the same: floats are rounded to one digit.

    A call whose arguments can't be described gives the operator's name alone.
    """
    try:
        body: dict[str, Any] = {"op": str(func), "args": [describe(a) for a in args]}
        if kwargs:
            body["kwargs"] = {k: describe(v) for k, v in kwargs.items()}
        if str(func) in _ASKING and not torch.is_grad_enabled():
            body["grad"] = False
    except TypeError:
        body = {"op": str(func)}
    return json.dumps(body, separators=(",", ":"))


def rebuild(text: str, device: str) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return the operator of a signature, with new arguments of the same dtypes, shapes and strides.

    Their values are such as a step might have: Note [Values of arguments].

    Raises:
        LookupError: The signature has no arguments, or this PyTorch has no such operator.
    """
    body = json.loads(text)
    if "args" not in body:
        raise LookupError(f"no arguments are known for {body['op']}")
    namespace, name, overload = body["op"].split(".")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as e:
        raise LookupError(f"this PyTorch has no operator {body['op']}") from e
    args = [_rebuilt(a, device) for a in body["args"]]
    kwargs = {k: _rebuilt(v, device) for k, v in body.get("kwargs", {}).items()}
    _set_values(func, args, kwargs)
    if (count := body.get("selected")) is not None:
        if func is _aten.masked_select.default:
            places = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
            _select(args[1], -(-count * args[1].numel() // max(1, places)))
        elif func is _aten.index.Tensor:
            _select(_masks(args[1])[0][1], count)
        else:
            _select(args[0], count, sparse_dims_of(func, args, kwargs) if func in TO_SPARSE else None)
    if str(func) in _ASKING:
        recorded, operator = body.get("grad", True), func

        def func(*args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(recorded):
                return operator(*args, **kwargs)

    return func, args, kwargs


def _rebuilt(value: Any, device: str) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "l":
        return [_rebuilt(v, device) for v in content]
    if kind == "f":
        return float(content)
    if kind == "c":
        return complex(*(_rebuilt(part, device) for part in content))
    if kind == "device":
        return torch.device(content)
    if kind not in ("t", "s", "n"):
        return getattr(torch, content)
    dtype = getattr(torch, content[0])
    if kind == "n":
        tensors = [drawn(shape, dtype, device) for shape in content[1]]
        return torch.nested.nested_tensor(tensors, dtype=dtype, device=device)
    if kind == "s":
        _, shape, sparse_dims, entries, coalesced = content
        values = drawn((entries, *shape[sparse_dims:]), dtype, device)
        return assembled(spread_indices(shape[:sparse_dims], entries).to(device), values, shape, coalesced)
    _, shape, stride = content
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return drawn([elements], dtype, device).as_strided(shape, stride)


# Elements that are selected by values


def with_selected(text: str, func: Any, args: Any, out: Any) -> str:
    """Return the text of a call with the number of elements that it selected by their values, if it selects any.

    Its memory and time depend on it.
    """
    if func in TO_SPARSE and args[0].layout is torch.strided and out.layout is torch.sparse_coo:
        with disable_current_modes():
            count = nnz(out)
    elif func is _aten.nonzero.default:
        count = int(out.shape[0])
    elif func is _aten.masked_select.default:
        count = int(out.numel())
    elif func is _aten.index.Tensor and (masks := _masks(args[1])):
        count = int(out.shape[masks[0][0]])
    else:
        return text
    return f'{text[:-1]},"selected":{count}}}'


def sparse_dims_of(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of sparse dimensions of the tensor that a call of `TO_SPARSE` makes."""
    if func is _aten._to_sparse.sparse_dim:
        return int(args[1])
    return int(args[0].dim() - (kwargs.get("dense_dim") or 0))


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


# Values of arguments


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


def _set_values(func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Set the values of a call's arguments that the operator needs, or that its time depends on; meta tensors stay."""
    name, given = str(func), {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    is_backward = "backward" in name
    if "grouped_mm" in name and isinstance(ends := args[2], torch.Tensor):  # groups are equally large
        left, right = args[:2]
        total = right.shape[-1] if left.dim() == 3 else left.shape[0 if right.dim() == 3 else -1]
        groups = torch.arange(1, ends.numel() + 1, device=ends.device)
        args[2] = (groups * total // ends.numel()).to(ends.dtype)
    if "embedding_bag" in name and is_backward:  # so are bags: the gradient of a maximum selects the nonempty ones
        sizes, indices = given.get("bag_size"), given.get("indices")
        if isinstance(sizes, torch.Tensor) and isinstance(indices, torch.Tensor) and sizes.numel():
            sizes.fill_(max(1, indices.numel() // sizes.numel()))
    if "ctc_loss" in name:  # sequences have their maximal length, and equally many labels
        scores, labels, lengths, counts = args[1:5] if is_backward else args[:4]
        # The backward pass writes as many scores as the forward pass made room for.
        most = (args[6].shape[-1] - 1) // 2 if is_backward else 2**31
        if isinstance(lengths, torch.Tensor) and isinstance(counts, torch.Tensor):
            lengths.fill_(scores.shape[0])
            bounds = torch.arange(counts.numel() + 1) * labels.numel() // max(1, counts.numel())
            counts.copy_(bounds.diff().clamp_(max=most))
    if "pack_padded_sequence" in name and not is_backward and given["lengths"].device.type != "meta":
        given["lengths"].fill_(given["input"].shape[1 if given["batch_first"] else 0])
    if "index_put" in name:  # a mask selects as many places as there are values to write
        for at, mask in _masks(given["indices"]):
            if given["values"].dim() == given["self"].dim() - mask.dim() + 1:
                _select(mask, given["values"].shape[at])
    if any(part in name for part in _SOLVING) and "check_errors" not in name:  # codes of errors, of which 0 is none
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for tensor in (t for t in tensors if 0 not in t.shape and 0 not in t.stride()):
            if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and tensor.is_floating_point():
                tensor.diagonal(dim1=-2, dim2=-1).add_(tensor.shape[-1])  # positive definite
            elif tensor.dim() and tensor.dtype is torch.int32:  # pivots: the identity
                tensor.copy_(torch.arange(1, tensor.shape[-1] + 1, device=tensor.device).expand(tensor.shape))
    if "segment_reduce" in name:  # segments are equally long, by their lengths or their offsets
        axis = given.get("axis", 0)
        for marked, first in (("lengths", 1), ("offsets", 0)):
            marks = given.get(marked)
            if isinstance(marks, torch.Tensor) and marks.numel() and marks.device.type != "meta":
                segments = marks.shape[axis] - 1 + first
                ends = torch.arange(segments + 1, device=marks.device)
                ends = ends * given["data"].shape[axis] // max(1, segments)
                marks.copy_((ends.diff() if first else ends).to(marks.dtype))
    for indices, count in _indices_of(name, given):
        if indices.device.type != "meta" and indices.numel():
            elements = 1 + sum((n - 1) * s for n, s in zip(indices.shape, indices.stride(), strict=True))
            shares = drawn([elements], torch.float32, indices.device)
            places = shares.sub_(_LEAST).mul_(count / (_MOST - _LEAST)).to(indices.dtype).clamp_(0, count - 1)
            indices.as_strided((elements,), (1,)).copy_(places)  # where it is expanded too


def _indices_of(name: str, arguments: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the indices among a call's arguments, and how many places each may name."""
    own, weight, index, indices = (arguments.get(each) for each in ("self", "weight", "index", "indices"))
    found: list[tuple[Any, int]] = []
    if isinstance(index, torch.Tensor) and isinstance(own, torch.Tensor) and own.dim() and "dim" in arguments:
        found = [(index, own.shape[arguments["dim"]])]
    elif isinstance(indices, list) and isinstance(own, torch.Tensor):
        dim = 0
        for each in indices:  # a mask stands for as many dimensions as it has
            is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
            if not is_mask and dim < own.dim():
                found.append((each, own.shape[dim]))
            dim += each.dim() if is_mask else 1
    elif "pool" in name and isinstance(own, torch.Tensor):
        found = [(indices, math.prod(own.shape[-3 if "pool3d" in name else -2 :]))]
    elif "num_weights" in arguments:
        found = [(indices, arguments["num_weights"])]
    elif "embedding" in name and isinstance(weight, torch.Tensor):
        found = [(indices, weight.shape[0])]
    integers = (torch.int64, torch.int32)
    return [(i, count) for i, count in found if isinstance(i, torch.Tensor) and i.dtype in integers and count > 1]

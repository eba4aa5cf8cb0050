"""Operator calls as text: the operator, with a description of its arguments that suffices to call it again.

`capture` records calls with `signature`, and `cost` runs them with `rebuild`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from memfit import sparse
from memfit._torch.operators import schema_of

_SOLVING = ("linalg", "cholesky", "triangular", "lu_")
"""Parts of the names of operators that fail, or loop for long, on singular matrices."""
_ASKING = ("aten.mkldnn_rnn_layer.default",)
"""Operators whose kernels are others where no gradients are recorded, as in reentrant checkpointing."""


def describe(argument: Any) -> Any:
    """Return an argument as JSON values; tensors by dtype, shape and stride, sparse ones by number of entries.

    Raises:
        TypeError: The argument is of a kind that has no description.
    """
    if isinstance(argument, torch.Tensor) and argument.layout is torch.sparse_coo:
        return {"s": sparse.describe(argument)}
    if isinstance(argument, torch.Tensor) and argument.layout is torch.strided and argument.is_nested:
        return {"n": sparse.describe_nested(argument)}
    if isinstance(argument, torch.Tensor):
        return {"t": [str(argument.dtype)[6:], list(argument.shape), list(argument.stride())]}
    if argument is None or isinstance(argument, bool | int | str):
        return argument
    if isinstance(argument, float):
        return float(f"{argument:.0e}") if math.isfinite(argument) else {"f": str(argument)}
    if isinstance(argument, list | tuple):
        return {"l": [describe(a) for a in argument]}
    if isinstance(argument, torch.dtype):
        return {"dtype": str(argument)[6:]}
    if isinstance(argument, torch.device):
        return {"device": argument.type}
    if isinstance(argument, torch.memory_format):
        return {"memory_format": str(argument)[6:]}
    if isinstance(argument, torch.layout):
        return {"layout": str(argument)[6:]}
    if isinstance(argument, torch.Generator):
        return None
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

    Floating-point tensors hold 0.5, others zeros, so that indices are in range. Groups of grouped products and bags of
    embeddings are equally large, masks select as many places as there are values to write, and matrices of linear
    algebra are regular.

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
    if str(func) in _ASKING:
        func = _with_gradients(func, body.get("grad", True))
    args = [_rebuild(a, device) for a in body["args"]]
    kwargs = {k: _rebuild(v, device) for k, v in body.get("kwargs", {}).items()}
    if "grouped_mm" in name:
        _spread_groups(args)
    if "embedding_bag" in name and "backward" in name:
        _fill_bags(func, args)
    if "ctc_loss" in name:
        _spread_labels(args[1:5] if "backward" in name else args[:4])
    if "index_put" in name:
        _select_as_many(func, args)
    if any(part in name for part in _SOLVING):
        _make_regular([*args, *kwargs.values()])
    return func, args, kwargs


def _with_gradients(func: Callable[..., Any], recorded: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(recorded):
            return func(*args, **kwargs)

    return run


def _make_regular(arguments: list[Any]) -> None:
    """Make square matrices positive definite, and pivots the identity, so that systems can be solved."""
    for tensor in (a for a in arguments if isinstance(a, torch.Tensor) and 0 not in a.shape and 0 not in a.stride()):
        if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and tensor.is_floating_point():
            tensor.diagonal(dim1=-2, dim2=-1).add_(tensor.shape[-1])
        elif tensor.dim() and tensor.dtype is torch.int32:
            tensor.copy_(torch.arange(1, tensor.shape[-1] + 1, device=tensor.device).expand(tensor.shape))


def _spread_labels(args: list[Any]) -> None:
    """Give the sequences of a CTC loss their maximal length, and equally many labels."""
    scores, labels, lengths, counts = args
    if isinstance(lengths, torch.Tensor) and isinstance(counts, torch.Tensor):
        lengths.fill_(scores.shape[0])
        ends = torch.arange(counts.numel() + 1) * labels.numel() // max(1, counts.numel())
        counts.copy_(ends.diff())


def _fill_bags(func: Any, args: list[Any]) -> None:
    """Make the bags of embeddings equally large: the gradient of a maximum selects the nonempty ones."""
    arguments = {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)}
    sizes, indices = arguments.get("bag_size"), arguments.get("indices")
    if isinstance(sizes, torch.Tensor) and isinstance(indices, torch.Tensor) and sizes.numel():
        sizes.fill_(max(1, indices.numel() // sizes.numel()))


def _select_as_many(func: Any, args: list[Any]) -> None:
    """Make a mask among indices select as many places as there are values to write."""
    arguments = {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)}
    written, indices, values = (arguments[name] for name in ("self", "indices", "values"))
    masks = [(at, index) for at, index in enumerate(indices) if index is not None]
    if len(masks) == 1 and masks[0][1].dtype is torch.bool:
        ((at, mask),) = masks
        if values.dim() == written.dim() - mask.dim() + 1:
            places = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
            mask.copy_(places < values.shape[at])


def _spread_groups(args: list[Any]) -> None:
    """Make the groups of a grouped matrix product equally large, by their offsets."""
    left, right, ends = args[:3]
    if isinstance(ends, torch.Tensor):
        total = right.shape[-1] if left.dim() == 3 else left.shape[0 if right.dim() == 3 else -1]
        groups = torch.arange(1, ends.numel() + 1, device=ends.device)
        args[2] = (groups * total // ends.numel()).to(ends.dtype)


def _rebuild(value: Any, device: str) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "t":
        dtype, shape, stride = content
        return _tensor(dtype, shape, stride, device)
    if kind == "s":
        return sparse.rebuild(content, device)
    if kind == "n":
        return sparse.rebuild_nested(content, device)
    if kind == "l":
        return [_rebuild(v, device) for v in content]
    if kind == "f":
        return float(content)
    return torch.device(content) if kind == "device" else getattr(torch, content)


def _tensor(dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    filled = torch.full((elements,), 0.5 if kind.is_floating_point else 0, dtype=kind, device=device)
    return filled.as_strided(shape, stride)

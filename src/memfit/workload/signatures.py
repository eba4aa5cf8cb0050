"""Operator calls as text: the operator, with a description of its arguments that suffices to call it again.

`capture` records calls with `signature`, and `cost` runs them with `rebuild`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from memfit.workload import sparse
from memfit.workload.argument_values import drawn, select, set_values

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
    if isinstance(argument, complex):
        return {"c": [describe(argument.real), describe(argument.imag)]}
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


def with_selected(text: str, count: int) -> str:
    """Return the text of a call that selects a number of elements by their values: its memory and time depend on it."""
    return f'{text[:-1]},"selected":{count}}}'


def rebuild(text: str, device: str) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return the operator of a signature, with new arguments of the same dtypes, shapes and strides.

    Their values are those of `argument_values`, as a step might have them.

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
    args = [_rebuild(a, device) for a in body["args"]]
    kwargs = {k: _rebuild(v, device) for k, v in body.get("kwargs", {}).items()}
    set_values(func, args, kwargs)
    if "selected" in body:
        select(func, args, kwargs, body["selected"])
    if str(func) in _ASKING:
        func = _with_gradients(func, body.get("grad", True))
    return func, args, kwargs


def _with_gradients(func: Callable[..., Any], recorded: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(recorded):
            return func(*args, **kwargs)

    return run


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
    if kind == "c":
        return complex(*(_rebuild(part, device) for part in content))
    return torch.device(content) if kind == "device" else getattr(torch, content)


def _tensor(dtype: str, shape: list[int], stride: list[int], device: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return drawn([elements], kind, device).as_strided(shape, stride)

"""State dicts as JSON and tensors, which a checkpoint holds instead of a pickle."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from memfit._torch.distributed import is_shared
from memfit.errors import CheckpointError

# JSON objects are tags, since a state dict may have keys other than strings:
#   {"dict": [[key, value], ...]}  {"counter": [[key, count], ...]}  {"tuple": [...]}  {"float": "nan"}
#   {"tensor": key, "order": [1, 0]}  a tensor in the file beside, and its dimensions by descending stride
_DICTS = (dict, OrderedDict, Counter)


def pack(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Return a value as JSON values; its tensors go into `tensors`.

    Args:
        value: None, bools, numbers, strings and tensors, in dicts, lists and tuples.
        tensors: Receives the tensors, contiguous, by their place.
        where: The place of the value, for the keys of tensors and for error messages.

    Raises:
        CheckpointError: The value holds an object of another kind, which only a pickle could keep.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, Mapping) and (type(value) in _DICTS or type(value).__name__ == "defaultdict"):
        pairs = [[_key(k, where), pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if type(value) in (list, tuple):
        items = [pack(v, tensors, f"{where}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}: a checkpoint can store None, bools, numbers, strings and tensors, in"
        " dicts, lists and tuples. Remove it from the state_dict()"
    )


def unpack(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `pack` packed, with new tensors.

    Raises:
        CheckpointError: The JSON was not made by `pack`, or names a missing tensor.
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [unpack(item, tensors) for item in node]
    try:
        tag, content = next(iter(node.items()))
        if tag == "tensor":
            return _unpack_tensor(tensors[content], node["order"])
        if tag == "float":
            return float(content)
        if tag == "tuple":
            return tuple(unpack(item, tensors) for item in content)
        kind = {"dict": dict, "counter": Counter}[tag]
        return kind({key: unpack(item, tensors) for key, item in content})
    except (AttributeError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as e:
        raise CheckpointError(f"a checkpoint's state can't have the form {str(node)[:80]!r}") from e


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, str) or type(key) is int:
        return key
    raise CheckpointError(
        f"{where} has the key {key!r}, a {type(key).__qualname__}: a checkpoint can store strings and ints as keys"
    )


def _pack_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> Any:
    is_dense = is_shared(type(tensor)) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    plain = is_dense and tensor.layout is torch.strided
    if not plain or tensor.dtype is torch.complex128 or tensor.is_quantized:
        raise CheckpointError(
            f"{where} is a {type(tensor).__qualname__} with dtype={tensor.dtype} and layout={tensor.layout}: a"
            " checkpoint can store plain dense tensors only"
        )
    key, n = where, 0
    while key in tensors:
        key, n = f"{where}#{n}", n + 1
    tensor = tensor.detach()
    if is_shared(type(tensor)):  # its part is contiguous
        tensors[key] = tensor
        return {"tensor": key, "order": list(range(tensor.dim()))}
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    tensors[key] = tensor.contiguous()
    return {"tensor": key, "order": order}


def _unpack_tensor(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy of a tensor, with its dimensions laid out in the order given; those of ranks as they are."""
    if is_shared(type(tensor)):
        return tensor
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, each contiguous; tensors that share a storage are written separately.

    Raises:
        OSError: The file can't be written.
    """
    seen: set[int] = set()
    separate = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[key] = (tensor.clone() if storage in seen else tensor).contiguous()
        seen.add(storage)
    try:
        save_file(separate, path, metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, on the CPU, and its metadata.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e

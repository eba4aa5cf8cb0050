"""Tensors within the arguments and outputs of calls: in containers of PyTorch, in dataclasses, and in mixes of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from memfit._torch.tensors import tree_flatten, tree_is_leaf, tree_unflatten

_PLAIN = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A numbered placeholder for a tensor."""

    number: int


def mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Return a value with all tensors, or all placeholders, replaced; containers and dataclasses are copied."""
    if isinstance(value, kind):
        return change(value)
    exact = type(value)
    if exact in _PLAIN:
        return value
    if exact is tuple or exact is list:
        return exact([mapped(item, kind, change) for item in value])
    if exact is dict:
        return {key: mapped(item, kind, change) for key, item in value.items()}
    if not tree_is_leaf(value):
        items, spec = tree_flatten(value, is_leaf=lambda item: item is not value)
        return tree_unflatten([mapped(item, kind, change) for item in items], spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Placeholder)):
        return _mapped_fields(value, kind, change)
    return value


def _mapped_fields(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    copied = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(copied, field.name, mapped(getattr(value, field.name), kind, change))
    return copied


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, repeated ones too, always in the same order."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    mapped(value, torch.Tensor, tensors.append)
    return tensors

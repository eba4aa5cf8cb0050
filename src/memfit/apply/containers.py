"""The tensors in a call's arguments and outputs: in PyTorch's containers, dataclasses, and any mix of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

_PLAIN = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class Value:
    """Stands for a tensor."""

    number: int


def mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Return a value with every item of a kind in it changed; containers and dataclasses are new ones.

    Args:
        value: Of any type.
        kind: What is changed: `torch.Tensor`, or `Value`.
        change: Takes an item, and returns what stands in its place.
    """
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
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Value)):
        return _mapped_fields(value, kind, change)
    return value


def _mapped_fields(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    copied = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(copied, field.name, mapped(getattr(value, field.name), kind, change))
    return copied


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, each as often as it is there, always in the same order."""
    found: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor):
        return [value]
    mapped(value, torch.Tensor, found.append)
    return found

"""The arguments of a call, parsed from its signature without torch."""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64", "double"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    "complex128": 16,
}
"""Bytes of an element by dtype; unlisted dtypes take one (bool, 8-bit integers and floats)."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor argument."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, as if contiguous."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)

    @property
    def channels_last(self) -> bool:
        """Whether an image or volume is in channels-last layout."""
        return len(self.shape) > 3 and self.shape[1] > 1 and self.strides[1] == 1


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call: tensors as `Tensor`, lists as lists, dtypes and devices by name."""

    values: list[Any]
    named: dict[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its place in the schema, or the default where the call left it out."""
        return self.values[position] if position < len(self.values) else self.named.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in order, including those in lists."""
        return [t for value in (*self.values, *self.named.values()) for t in _tensors_in(value)]


@functools.lru_cache(maxsize=65536)
def arguments(signature: str) -> Arguments:
    """Return the arguments in a signature; none where it is the operator's name alone."""
    body = msgspec.json.decode(signature)
    values = [_value(v) for v in body.get("args", [])]
    return Arguments(values, {name: _value(v) for name, v in body.get("kwargs", {}).items()})


def _value(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "t":
        dtype, shape, strides = content
        return Tensor(dtype, tuple(shape), tuple(strides))
    return [_value(v) for v in content] if kind == "l" else content


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors_in(v)] if isinstance(value, list) else []

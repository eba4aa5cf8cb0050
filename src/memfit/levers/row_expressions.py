"""Expressions of the rows of logits: what is done with each row, to be computed later, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from memfit._torch import tree_map, version_of

Index = npt.NDArray[np.int64]
_WRITTEN_TO = -1  # no tensor's version
_LEAST_BLOCK = 128  # rows of a block; smaller ones are copied


@dataclass(frozen=True, eq=False)
class Product:
    """A head's product that is put off."""

    hidden: Tensor  # input of the head, [..., features]; of a convolution a view in which the channels are last
    weight: Tensor  # [classes, features]
    bias: Tensor | None  # [classes]
    dtype: torch.dtype  # what it is computed in
    rows: int  # of logits that there may be at a time
    is_convolution: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors: input, weight and, where it has one, bias."""
        return [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]

    def value(self) -> Tensor:
        """Return the numbers, laid out as the head lays them out."""
        hidden, weight = self.hidden.to(self.dtype), self.weight.to(self.dtype)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        rows = by_rows(hidden, least_block=1)
        with torch.autocast(self.hidden.device.type, enabled=False):
            if not self.is_convolution or rows.stride(-1) == 1:
                return F.linear(hidden, weight, bias)
            made = F.conv1d(rows.mT if rows.dim() == 3 else rows.t()[None], weight[..., None], bias)
            return made.mT.view(*hidden.shape[:-1], len(weight))


@dataclass(frozen=True, eq=False)
class PerRow:
    """An argument that has a part for each row."""

    tensor: Tensor  # [..., size], with the leading dimensions of the expression
    is_flat: bool  # whether a row's part is a number, and not a vector
    version: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    @property
    def size(self) -> int | None:
        """Numbers of a row's part, where that is a vector."""
        return None if self.is_flat else self.tensor.shape[-1]

    @property
    def tracks(self) -> bool:
        """Whether it has a gradient."""
        return self.tensor.requires_grad


@dataclass(frozen=True, eq=False)
class Shared:
    """An argument that all rows have in common: a number, or a vector over the classes."""

    tensor: Tensor
    version: int

    @property
    def tracks(self) -> bool:
        """Whether it has a gradient."""
        return self.tensor.requires_grad


@dataclass(frozen=True, eq=False)
class Leaf:
    """The logits themselves."""

    product: Product
    versions: tuple[int, ...]  # of its tensors
    tracks: bool

    depth = 0

    @property
    def dtype(self) -> torch.dtype:
        """The logits' dtype."""
        return self.product.dtype

    @property
    def size(self) -> int | None:
        """The number of classes."""
        return self.product.weight.shape[0]


@dataclass(frozen=True, eq=False)
class Applied:
    """A function of rows' values. It takes and returns tensors of [rows] or [rows, size], and may return several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # expressions, their arguments that are tensors, and other values
    kwargs: dict[str, Any]
    tracks: bool  # whether it has a gradient
    autocast: torch.dtype | None  # of autocast, where it is called under that
    dtype: torch.dtype  # of its result
    size: int | None  # of a row's result, where that is a vector
    depth: int  # of expressions within one another


@dataclass(frozen=True, eq=False)
class Item:
    """One of several results of a function."""

    of: Applied
    place: int
    dtype: torch.dtype
    size: int | None

    @property
    def tracks(self) -> bool:
        """Whether it has a gradient."""
        return self.of.tracks and self.dtype.is_floating_point

    @property
    def depth(self) -> int:
        """Of expressions within one another."""
        return self.of.depth


Expression = Leaf | Applied | Item
EXPRESSIONS = (Leaf, Applied, Item, PerRow, Shared)


def by_rows(tensor: Tensor, least_block: int = _LEAST_BLOCK) -> Tensor:
    """Return a tensor that has a part for each row, [..., size], as [rows, size], or [blocks, rows of each, size].

    It is in blocks where its first dimension is not beside the others, as that of images whose channels come before
    their pixels and a block has so many rows at least; it is a copy where neither is a view.
    """
    dims = [(size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size != 1]
    gaps = [place for place in range(1, len(dims)) if dims[place - 1][1] != dims[place][1] * dims[place][0]]
    if gaps == [1] and tensor.numel() >= least_block * dims[0][0] * tensor.shape[-1]:
        return tensor.reshape(dims[0][0], -1, tensor.shape[-1])
    return tensor.reshape(-1, tensor.shape[-1])


def changes_of(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written to."""
    return 0 if tensor.is_inference() else version_of(tensor)


def leaf(product: Product) -> Leaf:
    """Return the logits of a product, as an expression."""
    tensors = product.tensors
    return Leaf(product, tuple(map(changes_of, tensors)), any(tensor.requires_grad for tensor in tensors))


def expressions_in(args: Any) -> list[Any]:
    """Return the expressions, and their arguments that are tensors, among a function's arguments."""
    found: list[Any] = []
    tree_map(lambda a: found.append(a) if isinstance(a, EXPRESSIONS) else None, args)
    return found


def parts_of(expression: Expression) -> Iterator[Any]:
    """Yield an expression and all that it is made of."""
    seen, waiting = set[int](), [expression]
    while waiting:
        value: Any = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            if isinstance(value, Applied):
                waiting += expressions_in((value.args, value.kwargs))
            elif isinstance(value, Item):
                waiting.append(value.of)


def tracked_tensors(expression: Expression) -> list[Tensor]:
    """Return the tensors that an expression has gradients by."""
    found: dict[int, Tensor] = {}
    for value in parts_of(expression):
        tensors = value.product.tensors if isinstance(value, Leaf) else getattr(value, "tensor", None)
        tensors = tensors if isinstance(tensors, list) else [] if tensors is None else [tensors]
        found.update({id(tensor): tensor for tensor in tensors if value.tracks and tensor.requires_grad})
    return list(found.values())


def is_stale(expression: Expression) -> bool:
    """Tell whether a tensor that an expression is made of was written to since."""
    return any(
        [changes_of(tensor) for tensor in value.product.tensors] != list(value.versions)
        if isinstance(value, Leaf)
        else isinstance(value, PerRow | Shared) and changes_of(value.tensor) != value.version
        for value in parts_of(expression)
    )


def of_other_rows(expression: Expression, change: Callable[[Tensor], Tensor]) -> Expression:
    """Return an expression of other rows: its arguments are changed, [..., size] each."""
    changed: Expression = _Rewriting(change)(expression)
    return changed


class _Rewriting:
    """A function that changes expressions.

    An object and not a closure that refers to itself, which would hold the tensors until a garbage collection.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change = change
        self._done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, EXPRESSIONS):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._anew(value)
        return self._done[id(value)]

    def _anew(self, value: Any) -> Any:
        if isinstance(value, PerRow):
            changed = self._change(value.tensor)  # which may copy it
            is_old = changes_of(value.tensor) != value.version
            return replace(value, tensor=changed, version=_WRITTEN_TO if is_old else changes_of(changed))
        if isinstance(value, Item):
            inner = self(value.of)
            return value if inner is value.of else replace(value, of=inner)
        if isinstance(value, Applied):
            if all(self(each) is each for each in expressions_in((value.args, value.kwargs))):
                return value  # the same for all rows, which share it then
            args, kwargs = tree_map(self, (value.args, value.kwargs))
            return replace(value, args=args, kwargs=kwargs)
        return value


class Output(NamedTuple):
    """Values to compute: those of an expression at some rows."""

    expression: Expression
    rows: Index  # of the products, in the order of the values; [values, rows of each] where a value is of several

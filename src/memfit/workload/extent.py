"""The extent of a batch, or of a call's arguments: how large its tensors are, and whether others are within it.

Tensors in lists whose entries are alike, as the targets of each image, share a column: its shape is the largest of
theirs, by dimension. A batch that is itself a list has a column for each entry: loaders make lists of a sample's parts.
So a batch is within another where no dimension of a column is larger, nor its number of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memfit.workload.batch import map_tensors, tensors_of

GROWTH = 1.25
"""The factor by which dimensions that grew again and again are looked ahead: batches of growing length are many."""

Pairs = Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
"""Shapes, and what each became."""


class Column(NamedTuple):
    """Tensors in the same place of like entries: their number, their largest dimensions, and bytes an element."""

    tensors: int
    shape: tuple[int, ...]
    itemsize: int

    def joined(self, other: Column) -> Column:
        shape = tuple(map(max, self.shape, other.shape))
        return Column(max(self.tensors, other.tensors), shape, max(self.itemsize, other.itemsize))


class Extent(dict[str, Column]):
    """The columns of a batch, or of arguments, by their paths."""

    @classmethod
    def of(cls, value: Any) -> Extent:
        """Return the extent of a batch, or of arguments."""
        found = cls()
        for path, tensor in _placed(value, ""):
            path = f"{path}:{tensor.dim()}" if path in found and len(found[path].shape) != tensor.dim() else path
            column, own = found.get(path), Column(1, tuple(tensor.shape), tensor.itemsize)
            found[path] = own if column is None else column.joined(own)._replace(tensors=column.tensors + 1)
        return found

    def covers(self, other: Extent) -> bool:
        """Tell whether no column of another extent is larger than this one's."""
        if self == other:
            return True
        for path, column in other.items():
            most = self.get(path)
            if most is None:  # a list in one of them, and a tuple in the other
                place = max((own for own in (*self, path) if _is_alike(own, path)), key=lambda own: own.count("*"))
                most, column = self._all_alike(place), other._all_alike(place) or column
            if most is None or len(most.shape) != len(column.shape):
                return False
            if column.tensors > most.tensors or column.itemsize > most.itemsize:
                return False
            if any(a > b for a, b in zip(column.shape, most.shape, strict=True)):
                return False
        return True

    def _all_alike(self, place: str) -> Column | None:
        """Return the columns of a place as one, with the tensors of all; None where there are none."""
        columns = [column for path, column in self.items() if _is_alike(path, place)]
        joined = functools.reduce(Column.joined, columns) if columns else None
        return joined and joined._replace(tensors=sum(c.tensors for c in columns))

    def joined(self, other: Extent) -> Extent:
        """Return the least extent that both are within, where their tensors have as many dimensions."""
        found = Extent(self)
        for path, column in other.items():
            own = found.get(path)
            found[path] = own.joined(column) if own is not None and len(own.shape) == len(column.shape) else column
        return found

    def looked_ahead(self, before: Extent) -> Extent:
        """Return this extent with the dimensions that grew increased further, so that small growth stays within it."""
        found = Extent(self)
        for path, column in self.items():
            old = before.get(path)
            if old is not None and len(old.shape) == len(column.shape):
                pairs = zip(old.shape, column.shape, strict=True)
                found[path] = column._replace(shape=tuple(max(b, int(GROWTH * a)) if b > a else b for a, b in pairs))
        return found

    def filled(self, value: Any) -> Any:
        """Return a batch with its tensors enlarged to this extent, by repetition of their values."""
        paths = iter([path for path, _ in _placed(value, "")])

        def enlarge(tensor: torch.Tensor) -> torch.Tensor:
            column = self.get(next(paths))
            return tensor if column is None else resized(tensor, column.shape)

        return map_tensors(enlarge, value)

    def text(self) -> str:
        """Return the extent for people: "8x3x256x256, 8"."""
        texts = [f"{column.tensors} of " * (column.tensors > 1) + shape_text(column.shape) for column in self.values()]
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        return ", ".join(texts[:3]) + more

    def difference_text(self, before: Extent) -> str:
        """Return where the extent exceeds another, for people: "8x3x320x320 instead of the planned 8x3x256x256"."""
        for path, column in self.items():
            own = Extent({path: column})
            if not before.covers(own):
                old = before.get(path)
                return own.text() + (f" instead of the planned {Extent({path: old}).text()}" if old else "")
        return self.text()


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor cut to a shape, or enlarged to it by repetition; itself where it has that shape."""
    with torch.no_grad():
        made = tensor
        for dim, size in enumerate(shape[: tensor.dim()]):
            if size < made.shape[dim]:
                made = made.narrow(dim, 0, size)
            elif size > made.shape[dim] > 0:
                index = torch.arange(size, device=made.device) % made.shape[dim]
                made = made.index_select(dim, index)
        return made if made is tensor else made.clone().requires_grad_(tensor.requires_grad)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape for people: "8x3x256x256"."""
    return "x".join(map(str, shape)) or "a number"


def _is_alike(one: str, other: str) -> bool:
    """Tell whether two paths are of the same place, where one or both lead through any entry of a list."""
    parts, others = one.split("."), other.split(".")
    return len(parts) == len(others) and all(a == b or "*" in (a, b) for a, b in zip(parts, others, strict=True))


def _placed(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a value in the order of `map_tensors`, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) is dict:
        for key, inner in value.items():
            yield from _placed(inner, f"{path}.{key}")
    elif type(value) in (list, tuple):
        kinds = {(i.dim(), i.dtype) if isinstance(i, torch.Tensor) else type(i) for i in value}
        is_alike = path != "" and type(value) is list and len(kinds) == 1
        for index, inner in enumerate(value):
            yield from _placed(inner, f"{path}.*" if is_alike else f"{path}.{index}")
    elif value is not None and type(value) not in (int, float, bool, str):
        for index, tensor in enumerate(tensors_of(value)):
            yield f"{path}.{index}", tensor

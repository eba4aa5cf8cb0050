"""The extent of a batch, or of a call's arguments: how large its tensors are, and whether others are within it.

Tensors in lists whose entries are alike, as the targets of each image, share a column: its shape is the largest of
theirs, by dimension. A batch that is itself a list has a column for each entry: loaders make lists of a sample's parts.
So a batch is within another where no dimension of a column is larger, nor its number of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memfit.workload.batch import map_tensors, tensors_of

GROWTH = 1.25
"""The factor by which dimensions that grew again and again are looked ahead: batches of growing length are many."""


class Column(NamedTuple):
    """Tensors in the same place of like entries: their number, their largest dimensions, and bytes an element."""

    tensors: int
    shape: tuple[int, ...]
    itemsize: int


Extent = Mapping[str, Column]


def extent_of(value: Any) -> Extent:
    """Return the extent of a batch, or of arguments: columns by their paths."""
    found: dict[str, Column] = {}
    for path, tensor in _placed(value, ""):
        path = f"{path}:{tensor.dim()}" if path in found and len(found[path].shape) != tensor.dim() else path
        column, own = found.get(path), Column(1, tuple(tensor.shape), tensor.itemsize)
        found[path] = own if column is None else _joined(column, own)._replace(tensors=column.tensors + 1)
    return found


def covers(largest: Extent, other: Extent) -> bool:
    """Tell whether no column of an extent is larger than that of another."""
    if largest == other:
        return True
    for path, column in other.items():
        most = largest.get(path)
        if most is None:  # a list in one of them, and a tuple in the other
            place = max((own for own in (*largest, path) if _is_alike(own, path)), key=lambda own: own.count("*"))
            most, column = _all_alike(largest, place), _all_alike(other, place) or column
        if most is None or len(most.shape) != len(column.shape):
            return False
        if column.tensors > most.tensors or column.itemsize > most.itemsize:
            return False
        if any(a > b for a, b in zip(column.shape, most.shape, strict=True)):
            return False
    return True


def joined(one: Extent, other: Extent) -> Extent:
    """Return the least extent that both are within, where their tensors have as many dimensions."""
    found = dict(one)
    for path, column in other.items():
        own = found.get(path)
        alike = own is not None and len(own.shape) == len(column.shape)
        found[path] = _joined(own, column) if own is not None and alike else column
    return found


def looked_ahead(before: Extent, now: Extent) -> Extent:
    """Return an extent with the dimensions that grew increased further, so that small growth stays within it."""

    def ahead(path: str, column: Column) -> Column:
        old = before.get(path)
        if old is None or len(old.shape) != len(column.shape):
            return column
        sizes = (max(b, int(GROWTH * a)) if b > a else b for a, b in zip(old.shape, column.shape, strict=True))
        return column._replace(shape=tuple(sizes))

    return {path: ahead(path, column) for path, column in now.items()}


def grown(value: Any, target: Extent) -> Any:
    """Return a batch with its tensors enlarged to an extent, by repetition of their values."""
    paths = iter([path for path, _ in _placed(value, "")])

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        column = target.get(next(paths))
        return tensor if column is None else resized(tensor, column.shape)

    return map_tensors(enlarge, value)


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


def extent_text(extent: Extent, most: int = 3) -> str:
    """Return an extent for people: "8x3x256x256 and 8"."""
    texts = [f"{column.tensors} of " * (column.tensors > 1) + shape_text(column.shape) for column in extent.values()]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def difference_text(now: Extent, before: Extent) -> str:
    """Return in which columns an extent exceeds another, for people: "8x3x320x320 instead of 8x3x256x256"."""
    parts = []
    for path, column in now.items():
        if not covers(before, {path: column}):
            old = before.get(path)
            parts.append(
                extent_text({path: column}) + (f" instead of the planned {extent_text({path: old})}" if old else "")
            )
    return parts[0] if parts else extent_text(now)


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape for people: "8x3x256x256"."""
    return "x".join(map(str, shape)) or "a number"


def _is_alike(one: str, other: str) -> bool:
    """Tell whether two paths are of the same place, where one or both lead through any entry of a list."""
    parts, others = one.split("."), other.split(".")
    return len(parts) == len(others) and all(a == b or "*" in (a, b) for a, b in zip(parts, others, strict=True))


def _all_alike(extent: Extent, place: str) -> Column | None:
    """Return the columns of a place as one, with the tensors of all; None where there are none."""
    columns = [column for path, column in extent.items() if _is_alike(path, place)]
    return functools.reduce(_joined, columns)._replace(tensors=sum(c.tensors for c in columns)) if columns else None


def _joined(one: Column, other: Column) -> Column:
    shape = tuple(map(max, one.shape, other.shape))
    return Column(max(one.tensors, other.tensors), shape, max(one.itemsize, other.itemsize))


def _placed(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a value in the order of `map_tensors`, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) is dict:
        for key, inner in value.items():
            yield from _placed(inner, f"{path}.{key}")
    elif type(value) in (list, tuple):
        alike = path != "" and type(value) is list and len({_kind(inner) for inner in value}) == 1
        for index, inner in enumerate(value):
            yield from _placed(inner, f"{path}.*" if alike else f"{path}.{index}")
    elif value is not None and type(value) not in (int, float, bool, str):
        for index, tensor in enumerate(tensors_of(value)):
            yield f"{path}.{index}", tensor


def _kind(value: Any) -> object:
    return (value.dim(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def sizes_changed(
    pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Return what other shapes become where some shapes became others: equal sizes become equal ones.

    A size that became several is told apart by its dimension, else it becomes the largest.
    """
    anywhere: dict[int, int] = {}
    placed: dict[tuple[int, int, int], int] = {}
    for old, new in pairs:
        if len(old) == len(new):
            for dim, (a, b) in enumerate(zip(old, new, strict=True)):
                anywhere[a] = max(anywhere.get(a, 0), b)
                placed[len(old), dim, a] = max(placed.get((len(old), dim, a), 0), b)

    def changed(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(placed.get((len(shape), dim, a), anywhere.get(a, a)) for dim, a in enumerate(shape))

    return changed

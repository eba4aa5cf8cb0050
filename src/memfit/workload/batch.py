"""Batches: their tensors, number of samples, and slices.

A batch is a tree. Its nodes are those of torch's pytree (users' registrations included), packed sequences, and objects
of Python classes: mappings, dataclasses, named tuples, plain objects. An object is taken apart into its items and
attributes, without running code of its class, and a slice of it is an object of the same class.

The samples are (1) the first dimension of every tensor that has one, if all agree; (2) else the entries of lists with
one entry for each sample, as detection targets: records (dicts or objects), or tensors of one dtype and number of
dimensions; (3) else the whole batch, as for a graph's nodes and edges: it counts as one sample, and is never cut. Lists
without tensors are cut if they have an entry for each sample; tuples too, unless they hold only numbers, as sizes of
images. Tensors without dimensions or without elements belong to every sample.
"""

from __future__ import annotations

import itertools
import logging
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from memfit._torch import disable_current_modes, tree_flatten, tree_is_leaf, tree_unflatten
from memfit.errors import WorkloadError
from memfit.workload.signatures import parts

_OPAQUE = (nn.Module, torch.optim.Optimizer, logging.Logger, type, types.ModuleType, types.FunctionType)
_BASES = {object, dict, OrderedDict, defaultdict, list, tuple, types.SimpleNamespace}
_NEW = types.BuiltinFunctionType
_HEAP_TYPE = 1 << 9  # flag of classes defined in Python; others, as `torch.dtype`, have their state in C
_Counts = set[int] | None  # the numbers of samples that a node may have; None for any


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the strided tensors of a batch, in order; for a sparse tensor its indices and values."""
    if type(batch) is dict and all(type(leaf) is torch.Tensor for leaf in batch.values()):
        return [part for leaf in batch.values() for part in parts_of(leaf)]
    return [part for leaf in _leaves(batch, set()) if isinstance(leaf, torch.Tensor) for part in parts_of(leaf)]


def leaves_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in the order of `map_tensors`, with repetitions."""
    tensors: list[torch.Tensor] = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(seen, value)
    return tensors


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold a tensor's memory: itself, unless it is sparse or jagged."""
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    return parts(tensor)


def packed_in(batch: Any) -> list[PackedSequence]:
    """Return the packed sequences of a batch, in order."""
    return [leaf for leaf in _leaves(batch, set(), packed=True) if isinstance(leaf, PackedSequence)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch with its tensors replaced; parts without changed tensors stay the same objects.

    The lengths of packed sequences stay as they are, on the CPU.
    """
    return _Rebuilding(function)(batch)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch; 1 where it can't be cut.

    Raises:
        WorkloadError: The batch has no samples.
    """
    return samples_in(batch) or 1


def samples_in(batch: Any) -> int | None:
    """Return the number of samples that a batch can be cut into, by the module's rules; None where it can't be cut.

    Raises:
        WorkloadError: The batch has no samples.
    """
    if type(batch) in (dict, tuple, list):
        sizes = {_first_dimension(leaf) for leaf in (batch.values() if type(batch) is dict else batch)}
        if len(sizes) == 1 and (size := sizes.pop()):
            return size
    return _samples(batch)[0]


def _samples(batch: Any) -> tuple[int | None, bool]:
    """Return the number of samples, and whether it is the first dimension of every tensor."""
    leaves = [leaf for leaf in _leaves(batch, set(), packed=True) if isinstance(leaf, torch.Tensor | PackedSequence)]
    sizes = {_rows(leaf) or is_uncut(leaf) for leaf in leaves} - {0}
    if not sizes:
        shapes = sorted({tuple(t.shape) for t in tensors_of(batch)})
        name = type(batch).__name__
        given = f"its tensors have the shapes {shapes}" if shapes else f"it is a {name} without a tensor"
        like = tuple(batch) if isinstance(batch, tuple) and batch and all(isinstance(n, int) for n in batch) else (8, 3)
        raise WorkloadError(
            f"Workload.batch has no samples: {given}. Give tensors whose first dimension is the batch, such"
            f" as torch.randn{like}. If Workload.loss_fn makes its own data, give Workload.batch_size=1"
        )
    if len(sizes) == 1 and not any(map(is_uncut, leaves)):
        return int(sizes.pop()), True
    counts = _counts(batch, set())
    return (min(counts) if counts else None), False


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from `start` up to `stop` of a batch: views of its tensors, in containers as they were.

    Raises:
        WorkloadError: The batch can't be cut.
    """
    if type(batch) is dict:
        sizes = {_first_dimension(leaf) for leaf in batch.values()}
        if len(sizes) == 1 and None not in sizes:  # much faster than the general way
            return {key: leaf[start:stop] for key, leaf in batch.items()}
    return _cut(batch, slice(start, stop))


def _first_dimension(leaf: Any) -> int | None:
    """Return the first dimension of a plain tensor; None for leaves that need the general way."""
    if type(leaf) is not torch.Tensor or not leaf.dim() or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    return leaf.size(0) or None


def take(batch: Any, samples: Sequence[int]) -> Any:
    """Return some samples of a batch, by their positions; their tensors are copies.

    Raises:
        WorkloadError: The batch can't be cut.
    """
    return _cut(batch, list(samples))


def tokens_per_sample(batch: Any) -> int | None:
    """Return the sequence length of a batch's first two-dimensional integer tensor; None without one."""
    tokens = [t for t in tensors_of(batch) if t.dim() == 2 and not t.is_floating_point() and t.dtype is not torch.bool]
    size = samples_in(batch) if tokens else None
    return next((int(t.shape[1]) for t in tokens if t.shape[0] == size), None)


def _cut(batch: Any, which: slice | list[int]) -> Any:
    size, is_uniform = _samples(batch)
    if size is None:
        shapes = [tuple(t.shape) for t in tensors_of(batch)]
        raise WorkloadError(
            f"Workload.batch can't be cut into microbatches: its tensors have different first dimensions, {shapes}."
            " Give Workload.batch_size and Workload.split to cut it, or run the whole batch at once"
        )
    return _Cutting(size, is_uniform, which, batch)(batch)


# The tree


def _leaves(value: Any, seen: set[int], packed: bool = False) -> Iterator[Any]:
    """Yield the leaves of a tree; with `packed`, packed sequences are among them."""
    if isinstance(value, torch.Tensor) or (packed and isinstance(value, PackedSequence)):
        yield value
        return
    children = _children(value)
    if children is None:
        yield value
        return
    if id(value) not in seen:  # objects may refer to each other
        seen.add(id(value))
        for child in children:
            yield from _leaves(child, seen, packed)


def _children(value: Any) -> list[Any] | None:
    """Return the children of a node; None for a leaf."""
    kind = type(value)
    if kind is dict:
        return list(value.values())
    if kind in (list, tuple):
        return list(value)
    if kind in (str, int, float, bool, type(None)):
        return None
    if not tree_is_leaf(value):
        return list(tree_flatten(value, is_leaf=inside(value))[0])
    return [*_items(value), *_attributes(value).values()] if _is_object(value) else None


def inside(node: Any) -> Callable[[Any], bool]:
    """Return a test for the children of a node, which does not keep the node alive.

    PyTorch's `tree_flatten` leaves a reference cycle with this test, which would keep the tensors alive until Python's
    collector runs.
    """
    own = id(node)
    return lambda inner: id(inner) != own


def _is_object(value: Any) -> bool:
    """Tell whether a value is of a Python class whose whole state is items and attributes."""
    if isinstance(value, _OPAQUE):
        return False
    return _base_of(type(value)) in _BASES and all(c in _BASES or c.__flags__ & _HEAP_TYPE for c in type(value).__mro__)


def _base_of(kind: type) -> type:
    """Return the first base of a class that is not written in Python, which creates its instances."""
    return next(c for c in kind.__mro__ if isinstance(c.__dict__.get("__new__"), _NEW) or c is object)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, list | tuple) else []


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, from its dict and its slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, member in kind.__dict__.items():
            is_slot = isinstance(member, types.MemberDescriptorType) and name != "__dict__"
            if is_slot and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


class _Rebuilding:
    """A rebuild of a tree with other tensors; subtrees with the same tensors stay the same objects."""

    def __init__(self, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensor = tensor
        self.made: dict[int, Any] = {}  # by the identity of the objects that they stand for

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, PackedSequence):
            return self.packed(value)
        if isinstance(value, weakref.ref):
            made = self.made.get(id(value()))
            return value if made is None else weakref.ref(made)
        if tree_is_leaf(value):
            return self._object(value) if _is_object(value) else value
        children, spec = tree_flatten(value, is_leaf=inside(value))
        new = [self(child) for child in children]
        return value if _same(new, children) else tree_unflatten(new, spec)

    def packed(self, value: PackedSequence) -> PackedSequence:
        data, indices = self.tensor(value.data), (value.sorted_indices, value.unsorted_indices)
        made = [None if part is None else self.tensor(part) for part in indices]
        return value if _same([data, *made], [value.data, *indices]) else PackedSequence(data, value.batch_sizes, *made)

    def _object(self, value: Any) -> Any:
        if id(value) in self.made:
            return self.made[id(value)]
        items, attributes = _items(value), _attributes(value)
        new: Any
        if isinstance(value, tuple):
            new_items = [self(item) for item in items]
            new = self.made[id(value)] = tuple.__new__(type(value), new_items)
        else:
            base: Any = _base_of(type(value))
            new = self.made[id(value)] = base.__new__(type(value))
            new_items = [self(item) for item in items]
        new_attributes = {name: self(attribute) for name, attribute in attributes.items()}
        if _same(new_items, items) and _same(new_attributes.values(), attributes.values()):
            self.made[id(value)] = value
            return value
        if isinstance(value, dict):  # by the builtin methods: a class may have its own
            put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
            if isinstance(value, defaultdict):
                new.default_factory = value.default_factory
            for key, item in zip(dict.keys(value), new_items, strict=True):
                put(new, key, item)
        elif isinstance(value, list):
            list.extend(new, new_items)
        own = getattr(value, "__dict__", {})
        for name, attribute in new_attributes.items():
            if name in own:
                new.__dict__[name] = attribute
            else:  # a slot, also where its class lets nothing be set, as frozen ones and those written in C do
                getattr(type(value), name).__set__(new, attribute)
        return new


def _same(made: Any, children: Any) -> bool:
    return all(a is b for a, b in zip(made, children, strict=True))


# Samples


def _rows(leaf: Any) -> int:
    """Return the first dimension of a tensor, or the samples of a packed sequence; 0 where there is none to cut."""
    if isinstance(leaf, PackedSequence):
        return _lengths(leaf)[0]
    return 0 if is_uncut(leaf) or not leaf.dim() or not leaf.numel() else int(leaf.shape[0])


def is_uncut(leaf: Any) -> bool:
    """Tell whether a leaf is a tensor that can't be sliced."""
    return isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested)


def _counts(node: Any, seen: set[int], root: bool = True) -> _Counts:
    """Return the numbers of samples that a node may have, by the module's rules; None for any."""
    if is_uncut(node):
        return set()
    if isinstance(node, torch.Tensor | PackedSequence):
        return {rows} if (rows := _rows(node)) else None
    children = _children(node)
    if children is None or id(node) in seen:
        return None
    seen.add(id(node))
    inside = _common([_counts(child, seen, root=False) for child in children])
    seen.discard(id(node))
    if inside == set() and _is_list_of_samples(node, children, root):
        return {len(children)}
    if inside is not None and not root and _is_list_of_samples(node, children, root):
        return inside | {len(children)}
    return inside


def _common(counts: list[_Counts]) -> _Counts:
    """Return the intersection of sets of numbers; None, for any number, puts no bounds."""
    bounds = [numbers for numbers in counts if numbers is not None]
    return set.intersection(*bounds) if bounds else None


def _is_list_of_samples(node: Any, children: list[Any], root: bool) -> bool:
    """Tell whether a node may be a list with an entry for each sample: records or, within a batch, tensors."""
    if type(node) not in (list, tuple) or not children:
        return False
    if _are_records(children):
        return True
    if root or not all(isinstance(child, torch.Tensor) and child.dim() for child in children):
        return False
    return len({(tensor.dtype, tensor.dim()) for tensor in children}) == 1


def _are_records(children: list[Any]) -> bool:
    kinds = {type(child) for child in children}
    kind = next(iter(kinds))
    is_inner = len(kinds) == 1 and not issubclass(kind, torch.Tensor) and _children(children[0]) is not None
    return is_inner and kind not in (list, tuple)


class _Cutting(_Rebuilding):
    """A rebuild of a tree from some of its samples.

    Args:
        is_uniform: Whether `size` is the first dimension of every tensor.
        which: The samples to take: a slice, or their positions.
    """

    def __init__(self, size: int, is_uniform: bool, which: slice | list[int], root: Any) -> None:
        # A bound method would form a cycle and keep the results alive.
        super().__init__(lambda tensor: tensor[which] if tensor.dim() and tensor.numel() else tensor)
        self.size, self.is_uniform, self.which, self.root = size, is_uniform, which, root

    def __call__(self, value: Any) -> Any:
        if type(value) in (list, tuple) and len(value) == self.size and self._is_per_sample(value):
            return type(value)(value[i] for i in self._positions())
        return super().__call__(value)

    def packed(self, value: PackedSequence) -> PackedSequence:
        """Return some samples of a packed sequence, packed: each step has the rows of the samples that reach it."""
        samples = list(self._positions())
        places = samples if value.unsorted_indices is None else value.unsorted_indices[samples].tolist()
        order = sorted(range(len(places)), key=places.__getitem__)  # keeps the order by length
        sizes = _lengths(value)
        starts = [0, *itertools.accumulate(sizes[:-1])]
        chosen = [[start + places[i] for i in order if places[i] < n] for start, n in zip(starts, sizes, strict=True)]
        device = value.data.device
        rows = torch.tensor([row for step in chosen for row in step], device=device)
        with disable_current_modes():  # PyTorch's C++ reads the lengths even where all other tensors are fake
            lengths = torch.tensor([len(step) for step in chosen if step])
        if value.unsorted_indices is None:
            return PackedSequence(value.data[rows], lengths)
        back = sorted(range(len(order)), key=order.__getitem__)
        indices = [torch.tensor(each, device=device) for each in (order, back)]
        return PackedSequence(value.data[rows], lengths, *indices)

    def _positions(self) -> Sequence[int]:
        return range(self.size)[self.which] if isinstance(self.which, slice) else self.which

    def _is_per_sample(self, value: Any) -> bool:
        root, children = value is self.root, list(value)
        inside = _common([_counts(child, set(), root=False) for child in children])
        if inside is None:
            return not root and not (type(value) is tuple and all(isinstance(v, int | float) for v in value))
        if not _is_list_of_samples(value, children, root):
            return False
        return not self.is_uniform or (not root and _are_records(children))


def _lengths(value: PackedSequence) -> list[int]:
    """Return the number of samples at each step, read without dispatch modes."""
    with disable_current_modes():
        sizes: list[int] = value.batch_sizes.tolist()
    return sizes

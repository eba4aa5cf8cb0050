"""In-place operators of autograd, which allocates another tensor instead while a dispatch mode is active.

The engine adds the gradients of a tensor in place if it holds the last reference to one of them
(`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), and backward formulas fill zeros in place
(`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp): both only without a tensor subclass or mode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from memfit._torch import (
    CLAMP_SPLITS_TIES,
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    storage_key_of,
    storage_use_count,
    use_count,
)

_aten = torch.ops.aten
_ADD, _ADD_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
_FILLING = {
    _aten.scatter.src: (_aten.scatter_.src, ("",)),  # in the formulas of all that select values: max, sort, topk, ...
    _aten.scatter_add.default: (_aten.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    _aten.index_add.default: (_aten.index_add_.default, ("IndexSelect",)),
    _aten.index_put.default: (_aten.index_put_.default, ("IndexBackward",)),
    _aten.index_fill.int_Tensor: (_aten.index_fill_.int_Tensor, ("Trace",)),
    _aten.put.default: (_aten.put_.default, ("Take",)),
    _aten.masked_scatter.default: (_aten.masked_scatter_.default, ("MaskedSelect",)),
    _aten.masked_fill.Scalar: (_aten.masked_fill_.Scalar, ("Atan2", "Clamp", "Fmax", "Fmin", "Maximum", "Minimum")),
}
"""Operators that fill a formula's tensors: their in-place forms, and prefixes of the autograd nodes' names."""
_CLAMPING = {
    _aten.logical_and.default: (_aten.logical_and_.default, ("Clamp",)),
    _aten.logical_or.default: (_aten.logical_or_.default, ("Clamp",)),
}
_CONTINUING = {
    _aten.sub.Tensor: (_aten.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _aten.mul.Tensor: (_aten.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    **({} if CLAMP_SPLITS_TIES else _CLAMPING),
}
"""Operators that write into the previous result, in the formulas of these autograd nodes."""


class Accumulation:
    """Choice of the operators that autograd runs without a dispatch mode. Create it outside of any mode.

    Args:
        is_of_this_node: Tells whether a tensor was made by the autograd node that is running, or ran just before;
            without it, sums in formulas are made in place too, where nothing else holds the first term.
    """

    def __init__(self, is_of_this_node: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        self._is_of_this_node = is_of_this_node
        self._last = _references_of_last()
        self._continued = -1  # key of the storage that the last formula wrote to in place

    def engine_operator(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operator and arguments that run without a mode.

        Call it straight from `__torch_dispatch__`, with its own arguments: their references are counted.
        """
        known = func is _ADD or func in _FILLING or func in _CONTINUING
        if not known or kwargs or current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func, args
        if func is not _ADD:
            return self._formula_operator(func, args), args
        if not isinstance(args[0], torch.Tensor) or (self._is_of_this_node(args[0]) and not _has_repeated_edge()):
            return func, args  # a sum of a formula
        is_own = self._is_last_reference(args)  # the engine does not ask about the second term
        return (_ADD_IN_PLACE if is_own and _called_by_engine() else func), args

    def _formula_operator(self, func: Any, args: Any) -> Any:
        in_place, nodes = _FILLING.get(func) or _CONTINUING[func]
        node: Any = current_autograd_node()
        if not ("" if node is None else node.name()).startswith(nodes) or not _called_by_engine():
            return func
        if func in _FILLING:
            return in_place
        storage = storage_key_of(args[0])
        # C++ holds both temporaries to the end of the statement: a result written in place has one reference more.
        if storage != self._continued and not self._is_last_reference(args):
            return func
        self._continued = storage
        return in_place

    def _is_last_reference(self, args: Any) -> bool:
        """Tell whether only the engine holds the first argument and its storage, which the argument covers."""
        if args[0].layout is not torch.strided or not _has_no_gaps(args[0]):
            return False
        return all(count <= last for count, last in zip(_references(args), self._last, strict=True))


def _has_repeated_edge() -> bool:
    """Tell whether two edges of the running autograd node lead to one tensor, whose gradients the engine adds."""
    node: Any = current_autograd_node()
    edges = [] if node is None else [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _called_by_engine() -> bool:
    """Tell whether no Python backward formula stands between the engine and this mode."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != graph.__file__:
        if frame.f_code.co_name in ("backward", "vjp"):
            return False
        frame = frame.f_back
    return frame is not None


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((d, n) for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _references(args: Any) -> tuple[int, int, int]:
    """Return the numbers of C++'s references to the first argument and its storage, and of Python's to the argument.

    The tensor is passed within the mode's arguments, so that no caller's frame holds the tensor itself: under Dynamo's
    frame evaluation each call holds its arguments.
    """
    storage = storage_use_count(storage_key_of(args[0]))
    return use_count(args[0]), storage, sys.getrefcount(args[0])


@functools.cache
def _references_of_last() -> tuple[int, int, int]:
    """Return the reference counts that a mode sees of a gradient that only the engine holds, in this PyTorch."""
    seen: list[tuple[int, int, int]] = []

    class Counting(Accumulation):
        def __init__(self) -> None:
            self._is_of_this_node = lambda tensor: False  # without `_last`, which this class measures

        def _is_last_reference(self, args: Any) -> bool:
            seen.append(_references(args))
            return False

        def _formula_operator(self, func: Any, args: Any) -> Any:
            return func  # only sums count

    counting = Counting()

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            func, args = counting.engine_operator(func, args, kwargs)
            return func(*args, **kwargs)

    with torch.enable_grad(), Look():  # type: ignore[no-untyped-call]
        y = torch.ones(1, requires_grad=True).exp()
        torch.autograd.backward([y.sin(), y.cos()], [torch.ones(1), torch.ones(1)])
    return seen[0]

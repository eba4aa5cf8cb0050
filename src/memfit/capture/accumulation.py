"""What autograd computes in place, and out of place while a dispatch mode looks on.

Where several paths lead to a tensor, the engine adds their gradients: in place if it holds the last reference to one
of them and no tensor subclass or mode is active (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
Formulas of the backward pass fill a tensor of zeros in place, under the same condition (`isTensorSubclassLike` in
torch/csrc/autograd/FunctionsManual.cpp). Under a mode both always make another tensor, which the step without the mode
never has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

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
}
"""Operators that fill a formula's own zeros: what they are without a mode, and how the names of the nodes begin."""
_CONTINUING = {
    _aten.sub.Tensor: (_aten.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _aten.mul.Tensor: (_aten.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _aten.logical_and.default: (_aten.logical_and_.default, ("Clamp",)),
    _aten.logical_or.default: (_aten.logical_or_.default, ("Clamp",)),
}
"""Operators that go on in the result before, in the formulas of these nodes."""


class Accumulation:
    """Runs sums and fillings in place where the engine does so without a mode. To be made outside of any mode.

    To be asked straight from a mode's `__torch_dispatch__`, which gave it its own arguments: references are counted.

    Args:
        is_of_this_node: Tells whether a tensor was made by the node that is running, or ran just before; without it,
            sums in formulas are made in place too, where nothing else holds the first term.
    """

    def __init__(self, is_of_this_node: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        self._is_of_this_node = is_of_this_node
        self._last = _references_of_last()
        self._continued = -1  # the storage that the formula before last wrote to in place

    def as_the_engine(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operator and arguments that run where no mode looks on."""
        known = func is _ADD or func in _FILLING or func in _CONTINUING
        if not known or kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func, args
        if func is not _ADD:
            return self._as_the_formula(func, args), args
        if not isinstance(args[0], torch.Tensor) or (self._is_of_this_node(args[0]) and not _leads_twice_to_one()):
            return func, args  # a sum of a formula
        is_own = self._is_last(args)  # of the other it does not ask
        return (_ADD_IN_PLACE if is_own and _called_by_engine() else func), args

    def _as_the_formula(self, func: Any, args: Any) -> Any:
        in_place, nodes = _FILLING.get(func) or _CONTINUING[func]
        if not _current_node().startswith(nodes) or not _called_by_engine():
            return func
        if func in _FILLING:
            return in_place
        storage = args[0].untyped_storage()._cdata
        # What went on in place is referred to by both temporaries, until the end of the statement.
        if storage != self._continued and not self._is_last(args):
            return func
        self._continued = storage
        return in_place

    def _is_last(self, args: Any) -> bool:
        """Tell whether the engine alone holds the first argument and its storage, all of whose memory it covers."""
        if args[0].layout is not torch.strided or not _is_dense(args[0]):
            return False
        return all(found <= last for found, last in zip(_references(args), self._last, strict=True))


def _current_node() -> str:
    """Return the name of the node whose backward formula is running, "" for none."""
    node: Any = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def _leads_twice_to_one() -> bool:
    """Tell whether two gradients of the node that runs, or ran just before, are of one tensor: the engine adds them."""
    node: Any = torch._C._current_autograd_node()
    edges = [] if node is None else [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _called_by_engine() -> bool:
    """Tell whether no Python code of a backward formula is between the engine and this mode."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != graph.__file__:
        if frame.f_code.co_name in ("backward", "vjp"):
            return False
        frame = frame.f_back
    return frame is not None


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted((d, n) for n, d in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _references(args: Any) -> tuple[int, int, int]:
    """Return how often the first argument and its storage are referred to by C++, and the argument by Python.

    To C++, a tensor that Python holds, as modules with backward hooks hold gradients, is held once by what wraps it for
    Python: as is any that a mode sees. The tensor comes within the mode's arguments, for its callers to hold those and
    not the tensor: where Dynamo has put its own evaluation of frames, each call holds what it was called with.
    """
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return args[0]._use_count(), storage, sys.getrefcount(args[0])


@functools.cache
def _references_of_last() -> tuple[int, int, int]:
    """Return the references that a mode sees of a gradient which only the engine holds, in this PyTorch."""
    seen: list[tuple[int, int, int]] = []

    class Counting(Accumulation):
        def __init__(self) -> None:
            self._is_of_this_node = lambda tensor: False  # `_last` is what it is there to find

        def _is_last(self, args: Any) -> bool:
            seen.append(_references(args))
            return False

        def _as_the_formula(self, func: Any, args: Any) -> Any:
            return func  # only sums count

    counting = Counting()

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            func, args = counting.as_the_engine(func, args, kwargs)
            return func(*args, **kwargs)

    with torch.enable_grad(), Look():  # type: ignore[no-untyped-call]
        y = torch.ones(1, requires_grad=True).exp()
        torch.autograd.backward([y.sin(), y.cos()], [torch.ones(1), torch.ones(1)])
    return seen[0]

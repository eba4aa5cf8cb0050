"""Gradients that autograd adds up in place, and out of place while a dispatch mode looks on.

Where several paths lead to a tensor, the engine adds their gradients: in place if it holds the last reference to one
of them and no tensor subclass or mode is active (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
Under a mode it always makes a third tensor, which the step without the mode never has.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


class Accumulation:
    """Finds additions of the engine and makes them what they are without a mode. To be made outside of any mode."""

    def __init__(self) -> None:
        self._last = _references_of_last()

    def as_the_engine(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operator and arguments that run where no mode looks on."""
        if func is not _ADD or kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return func, args
        for target, other in (args, args[::-1]):
            if isinstance(target, torch.Tensor) and self._is_last(target) and _called_by_engine():
                return _ADD_IN_PLACE, (target, other)
        return func, args

    def _is_last(self, tensor: torch.Tensor) -> bool:
        """Tell whether the engine alone holds a tensor and its storage, all of whose memory the tensor covers."""
        if tensor.layout is not torch.strided or not _is_dense(tensor):
            return False
        return all(found <= last for found, last in zip(_references(tensor), self._last, strict=True))


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


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor and its storage are referred to, by C++ and by Python."""
    counted: Any = tensor
    return counted._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _references_of_last() -> tuple[int, int]:
    """Return the references that a mode sees of a gradient which only the engine holds, in this PyTorch."""
    seen: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Look():  # type: ignore[no-untyped-call]
        y = torch.ones(1, requires_grad=True).exp()
        torch.autograd.backward([y.sin(), y.cos()], [torch.ones(1), torch.ones(1)])
    return seen[0]

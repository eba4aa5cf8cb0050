"""Deep copies of objects that hold generators, locks or other parts that `copy.deepcopy` refuses."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from memfit._torch.dispatch import DisableTorchFunction
from memfit.batch import tensors_of

T = TypeVar("T")


def copied(make: Callable[[], T]) -> T:
    """Return the result of a function that calls `copy.deepcopy`, sharing the parts that can't be copied.

    Random generators are copied with their states. Locks, open files and the like are shared with the original: objects
    that no protocol copies, that hold no tensors, and that are not used up by reading.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reduced_by(torch.Generator, lambda generator: (_clone, (_AsIs(generator),))))
        while True:
            try:
                return make()
            except Exception as e:
                failed = _failed(e)
                if failed is None or type(failed) in copyreg.dispatch_table or not _may_be_shared(failed):
                    raise
                stack.enter_context(_reduced_by(type(failed), _shared))


@contextlib.contextmanager
def _reduced_by(kind: type, reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Register a function that reduces objects of a class for `copy.deepcopy`, until the context is left."""
    before = copyreg.dispatch_table.get(kind)
    copyreg.pickle(kind, reduce)
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[kind]
        else:
            copyreg.dispatch_table[kind] = before


class _AsIs:
    """A holder that `copy.deepcopy` passes on without copying its value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _AsIs:
        return self


def _clone(held: _AsIs) -> torch.Generator:
    with DisableTorchFunction():
        clone: torch.Generator = held.value.clone_state()
    return clone


def _shared(value: Any) -> str:
    """Return a string, which tells `copy.deepcopy` to share the object."""
    if not _may_be_shared(value):
        raise TypeError(f"a {type(value).__name__} that holds tensors can't be copied")
    return "shared"


def _failed(error: Exception) -> Any:
    """Return the object whose innermost `copy.deepcopy` call failed; None without such a call."""
    failed, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            failed = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return failed


def _may_be_shared(value: Any) -> bool:
    is_used_up = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    return not is_used_up and not isinstance(value, nn.Module | torch.optim.Optimizer) and not tensors_of(value)

"""Deep copies of what models and batches hold beside tensors: generators, locks, closures, weak references."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from memfit.batch import tensors_of

T = TypeVar("T")


def copied(make: Callable[[], T]) -> T:
    """Return what a function makes by `copy.deepcopy`, where some of it can't be copied and need not be.

    Generators of random numbers are copied with their states. Locks, open files and the like are shared with the
    original: what no protocol copies, holds no tensors, and is not used up by being read.

    Args:
        make: Copies everything anew each time it is called.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_reduced_by(torch.Generator, _reduced_generator))
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
    """Have `copy.deepcopy` take apart objects of a class by a function, until the context is left."""
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
    """Carries something through `copy.deepcopy` as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _AsIs:
        return self


def _reduced_generator(generator: torch.Generator) -> Any:
    return _clone, (_AsIs(generator),)


def _clone(held: _AsIs) -> torch.Generator:
    with torch._C.DisableTorchFunction():
        clone: torch.Generator = held.value.clone_state()
    return clone


def _shared(value: Any) -> str:
    """Return what tells `copy.deepcopy` that an object stands for itself."""
    if not _may_be_shared(value):
        raise TypeError(f"a {type(value).__name__} that holds tensors can't be copied")
    return "shared"


def _failed(error: Exception) -> Any:
    """Return the object that `copy.deepcopy` could not copy: that of the innermost call; None without one."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is copy.deepcopy.__code__:
            found = trace.tb_frame.f_locals["x"]
        trace = trace.tb_next
    return found


def _may_be_shared(value: Any) -> bool:
    is_used_up = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
    return not is_used_up and not isinstance(value, nn.Module | torch.optim.Optimizer) and not tensors_of(value)


def rebind(model: nn.Module, memo: dict[int, Any]) -> None:
    """Have what a copied model's modules hold refer to the copy: closures and weak references, which copies share.

    Args:
        model: The copy.
        memo: As `copy.deepcopy` left it: by the identity of each original, its copy.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                rebound = _rebound(value, memo)
                if rebound is not value:
                    module.__dict__[name] = rebound


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value that refers to copies of modules and tensors, where it refers to the originals."""
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, memo)
    if isinstance(value, weakref.ref):
        made = _copy_of(value(), memo)
        return value if made is None else weakref.ref(made)
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            if (rebound := _rebound(inner, memo)) is not inner:
                value[key] = rebound
    elif isinstance(value, list):
        value[:] = [_rebound(inner, memo) for inner in value]
    elif type(value) is tuple:
        return tuple(_rebound(inner, memo) for inner in value)
    return value


def _rebound_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    new_cells = tuple(_rebound_cell(cell, memo) for cell in cells)
    new_defaults = tuple(_or_copy(value, memo) for value in defaults)
    if all(map(lambda a, b: a is b, (*new_cells, *new_defaults), (*cells, *defaults))):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, new_defaults or None, new_cells or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _rebound_cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        made = _or_copy(cell.cell_contents, memo)
    except ValueError:  # empty yet
        return cell
    return cell if made is cell.cell_contents else types.CellType(made)


def _or_copy(value: Any, memo: dict[int, Any]) -> Any:
    made = _copy_of(value, memo)
    return value if made is None else made


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of a module or tensor that was copied; None for all else."""
    return memo.get(id(value)) if isinstance(value, nn.Module | torch.Tensor) else None

"""Generators of random numbers for one thread's turn, where other threads may draw meanwhile.

A verb draws, and sets generators back; a training in another thread must not notice. So in a process with several
threads the turn has copies of the global generators, which its code draws from and sets: PyTorch's on the CPU, Python's
and NumPy's. Not covered are generators of accelerators, and code that holds one of Python's or NumPy's functions, or
the object they are methods of, from before (`from random import random`).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from memfit._torch.operators import before_backends, destroy_library, drawing_operators
from memfit._torch.replacement import replaced, replaced_here
from memfit.turns import has_turn

_SHARED: tuple[tuple[Any, Any], ...] = tuple((module, module.random.__self__) for module in (random, np.random))
"""The modules that have a global generator's methods as functions, and the generator."""

_are_own = False  # in the turn that there is


class _OfThread:
    """PyTorch's default generator on the CPU; for the thread that has the turn, a generator of its own."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own if has_turn() else torch.default_generator, name)


def default_generator() -> torch.Generator:
    """Return the generator that this thread draws from by default, on the CPU."""
    found: torch.Generator = vars(torch.random)["default_generator"]
    return found


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Draw from copies of the global generators, in the thread that has the turn, until the context is left."""
    of_torch = torch.Generator().set_state(torch.default_generator.get_state())
    of_python, of_numpy = random.Random(), np.random.RandomState()
    of_python.setstate(random.getstate())
    of_numpy.set_state(np.random.get_state(legacy=False))
    library = torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(destroy_library, library)
        for func, position in drawing_operators():
            before_backends(library, func, _drawing_from(of_torch, position))
        stack.enter_context(replaced(torch.random, "default_generator", _OfThread(of_torch)))
        for (module, shared), own in zip(_SHARED, (of_python, of_numpy), strict=True):
            for name in [name for name, value in vars(module).items() if getattr(value, "__self__", None) is shared]:
                stack.enter_context(replaced_here(module, name, getattr(own, name)))
        stack.enter_context(replaced_here(np.random, "seed", of_numpy.seed))
        yield


def _drawing_from(own: torch.Generator, position: int) -> Callable[..., Any]:
    """Return a kernel that gives a generator where none, or the default one, is given."""

    def kernel(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("generator")
        is_global = given is None or given is torch.default_generator
        if not is_global or not has_turn() or any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in args):
            return run(*args, **kwargs)
        if position < len(args):
            return run(*args[:position], own, *args[position + 1 :], **kwargs)
        return run(*args, **{**kwargs, "generator": own})

    return kernel


@contextlib.contextmanager
def generators_of_turn() -> Iterator[None]:
    """Draw from own generators in a turn, where the process has other threads, until the context is left."""
    global _are_own
    if _are_own or threading.active_count() == 1:
        yield
        return
    _are_own = True
    try:
        with own_generators():
            yield
    finally:
        _are_own = False

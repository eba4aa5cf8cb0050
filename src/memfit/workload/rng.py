"""The global random number generators: PyTorch's, on the CPU and on accelerators, Python's and NumPy's.

[Own generators] A verb draws, and sets generators back; a training in another thread must not notice. So in a process
with several threads a turn has copies of the global generators, which its code draws from and sets: PyTorch's on the
CPU, Python's and NumPy's. Not covered are generators of accelerators, and code that holds one of Python's or NumPy's
functions, or the object they are methods of, from before (`from random import random`).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from memfit import hardware
from memfit._torch import (
    before_backends,
    destroy_library,
    disable_current_modes,
    drawing_operators,
    replaced,
    replaced_here,
)
from memfit.errors import CheckpointError
from memfit.foundations import has_this_turn

RngState = dict[str, Any]
"""The state of all generators, as JSON values."""


def rng_state() -> RngState:
    """Return the state of the global generators; those of accelerators only if PyTorch has used one."""
    used = hardware.accelerators.used_kind()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": _hex(torch.get_rng_state()),
        "accelerators": {kind: [*map(_hex, hardware.accelerators.rng_states(kind))] for kind in [used] if kind},
        "python": [version, list(internal), gauss_next],
        "numpy": _listed(np.random.get_state(legacy=False)),
    }


def check_rng_state(state: RngState) -> None:
    """Raise CheckpointError unless the global generators could be set to a state."""
    try:
        version, internal, gauss_next = state["python"]
        random.Random().setstate((version, tuple(internal), gauss_next))
        torch.Generator().set_state(bytes_tensor(state["torch"]))
        for texts in state["accelerators"].values():
            for text in texts:
                bytes_tensor(text)
        current = np.random.get_state(legacy=False)
        try:
            np.random.set_state(_arrays(state["numpy"]))
        finally:
            np.random.set_state(current)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise CheckpointError(f"the checkpoint's state of the random number generators can't be set: {e}") from e


def set_rng_state(state: RngState) -> None:
    """Set the global generators to a state of `rng_state`. Those of accelerators that are not here are ignored."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(bytes_tensor(state["torch"]))
    np.random.set_state(_arrays(state["numpy"]))
    for kind, texts in state["accelerators"].items():
        if kind == hardware.accelerators.current_kind():
            hardware.accelerators.set_rng_states(kind, [bytes_tensor(text) for text in texts])


def rng_snapshot() -> Callable[[], None]:
    """Return a function that restores the present state of the global generators; much cheaper than `rng_state`."""
    kind = hardware.accelerators.used_kind()
    there = [] if kind is None else hardware.accelerators.rng_states(kind)
    seed = torch.initial_seed()
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)

    def set_back() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if kind is not None:
            hardware.accelerators.set_rng_states(kind, there)
        elif used := hardware.accelerators.used_kind():  # for the first time meanwhile: as if for the first time
            hardware.accelerators.seed(used, seed)

    return set_back


@contextlib.contextmanager
def rng_preserved() -> Iterator[None]:
    """Restore the global generators on leaving."""
    set_back = rng_snapshot()
    try:
        yield
    finally:
        set_back()


def generator_state(generator: torch.Generator) -> str:
    """Return the state of a generator as text."""
    return _hex(generator.get_state())


def bytes_tensor(text: str) -> torch.Tensor:
    """Return the uint8 tensor of a hexadecimal text."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"array", "dtype"}:
        return np.array(value["array"], dtype=value["dtype"])
    return {key: _arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


class ForeignGenerator(NamedTuple):
    """A generator whose state PyTorch does not restore: `read` returns a copy of its state, and `write` sets it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def foreign_generator(held: Any) -> ForeignGenerator:
    """Return the reader and writer of the state of a generator of PyTorch, Python or NumPy."""
    if isinstance(held, torch.Generator):

        def read() -> bytes:  # a tensor would show up in traces
            with disable_current_modes():
                return bytes(held.get_state().numpy())

        def write(state: bytes) -> None:
            with disable_current_modes():
                held.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

        return ForeignGenerator(read, write)
    if isinstance(held, random.Random):
        return ForeignGenerator(held.getstate, held.setstate)
    if isinstance(held, np.random.RandomState):
        return ForeignGenerator(lambda: held.get_state(legacy=False), held.set_state)
    bits = held.bit_generator if isinstance(held, np.random.Generator) else held
    return ForeignGenerator(lambda: bits.state, lambda state: setattr(bits, "state", state))


def same_states(a: Any, b: Any) -> bool:
    """Tell whether two states are equal; NumPy's are dictionaries that hold arrays."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_states(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)


_SHARED: tuple[tuple[Any, Any], ...] = tuple((module, module.random.__self__) for module in (random, np.random))
"""The modules that have a global generator's methods as functions, and the generator."""

_are_own = False  # in the turn that there is


class _OfThread:
    """PyTorch's default generator on the CPU; for the thread that has the turn, a generator of its own."""

    def __init__(self, own: torch.Generator) -> None:
        self.own, self.has_it = own, has_this_turn()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own if self.has_it() else torch.default_generator, name)


def default_generator() -> torch.Generator:
    """Return the generator that this thread draws from by default, on the CPU."""
    found: torch.Generator = vars(torch.random)["default_generator"]
    return found


@contextlib.contextmanager
def generators_of_turn() -> Iterator[None]:
    """Draw from copies of the global generators in a turn, where the process has other threads, until it is left."""
    global _are_own
    if _are_own or threading.active_count() == 1:
        yield
        return
    of_torch = torch.Generator().set_state(torch.default_generator.get_state())
    of_python, of_numpy = random.Random(), np.random.RandomState()
    of_python.setstate(random.getstate())
    of_numpy.set_state(np.random.get_state(legacy=False))
    library = torch.library.Library("aten", "IMPL")
    _are_own = True
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(destroy_library, library)
            for func, position in drawing_operators():
                before_backends(library, func, _drawing_from(of_torch, position))
            stack.enter_context(replaced(torch.random, "default_generator", _OfThread(of_torch)))
            for (module, shared), own in zip(_SHARED, (of_python, of_numpy), strict=True):
                names = [name for name, value in vars(module).items() if getattr(value, "__self__", None) is shared]
                for name in names:
                    stack.enter_context(replaced_here(module, name, getattr(own, name)))
            stack.enter_context(replaced_here(np.random, "seed", of_numpy.seed))
            yield
    finally:
        _are_own = False


def _drawing_from(own: torch.Generator, position: int) -> Callable[..., Any]:
    """Return a kernel that gives a generator where none, or the default one, is given."""
    has_it = has_this_turn()

    def kernel(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("generator")
        is_global = given is None or given is torch.default_generator
        if not is_global or not has_it() or any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in args):
            return run(*args, **kwargs)
        if position < len(args):
            return run(*args[:position], own, *args[position + 1 :], **kwargs)
        return run(*args, **{**kwargs, "generator": own})

    return kernel

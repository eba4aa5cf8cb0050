"""The random number generators that a recomputation sets back, so that it draws what the forward pass drew.

PyTorch's own are kept for each call, as `torch.utils.checkpoint` does. Those of Python, of NumPy and of the modules
themselves are seldom drawn from: their states are looked at before and after a call, and kept where they changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import get_device_states, set_device_states

_TWISTER_BYTES = 2500  # of NumPy's Mersenne Twister: 624 integers and its position among them


@dataclasses.dataclass(frozen=True)
class Generators:
    """The states of PyTorch's generators, of the CPU and of the devices of some tensors."""

    cpu: torch.Tensor
    kind: str
    devices: list[int]
    states: list[torch.Tensor]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Generators:
        places = {t.device: t for t in tensors if t.device.type not in ("cpu", "meta")}
        kind = next((device.type for device in places), "cpu")
        devices: list[int] = []
        states: list[torch.Tensor] = []
        if kind != "cpu" and getattr(torch.get_device_module(kind), "_initialized", False):
            devices, states = get_device_states(*places.values())
        return cls(torch.get_rng_state(), kind, devices, states)

    def are_as_before(self) -> bool:
        """Tell whether the generators still have these states. Fake operators draw nothing."""
        if is_fake(self.cpu):
            return True
        now = [torch.get_rng_state()]
        now += [torch.get_device_module(self.kind).get_rng_state(device) for device in self.devices]
        return all(torch.equal(one, other) for one, other in zip(now, [self.cpu, *self.states], strict=True))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the generators back to these states, until the context is left."""
        with torch.random.fork_rng(self.devices, device_type=self.kind if self.devices else "cuda"):
            self.restore()
            yield

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.kind)


class Source(NamedTuple):
    """A generator that PyTorch does not set back by itself.

    Attributes:
        read: Returns its state, which no later draw changes.
        write: Sets it to such a state.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


def sources(held: Iterable[Any] = ()) -> list[Source]:
    """Return Python's and NumPy's global generators, and those of some objects.

    Args:
        held: Generators of PyTorch, Python or NumPy.
    """
    return [_PYTHON, _NUMPY, *(_source(one) for one in held)]


def _source(held: Any) -> Source:
    if isinstance(held, torch.Generator):
        return Source(lambda: _bytes_of(held), lambda state: _set_bytes(held, state))
    if isinstance(held, random.Random):
        return Source(held.getstate, held.setstate)
    if isinstance(held, np.random.RandomState):
        return Source(lambda: held.get_state(legacy=False), held.set_state)
    bits = held.bit_generator if isinstance(held, np.random.Generator) else held
    return Source(lambda: bits.state, lambda state: setattr(bits, "state", state))


def _bytes_of(generator: torch.Generator) -> bytes:
    """Return the state of a generator of PyTorch, not as a tensor: a trace knows of none for it."""
    with _disable_current_modes():
        return bytes(generator.get_state().numpy())


def _set_bytes(generator: torch.Generator, state: bytes) -> None:
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Numpy:
    """NumPy's global generator, whose whole state takes long to read: only where its bits are others than before.

    What is left of a pair of normal numbers is no part of these bits. Where one is left, all is read each time.
    """

    def __init__(self) -> None:
        self._last: tuple[object, bytes, dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        bits = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        if not isinstance(bits, np.random.MT19937):
            return _numpy_state()
        now = ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)
        last = self._last
        if last is None or last[0] is not bits or last[1] != now or last[2]["has_gauss"]:
            self._last = last = bits, now, _numpy_state()
        return last[2]

    def write(self, state: dict[str, Any]) -> None:
        """Set the generator to a state, which may have the bits that were read last and another rest."""
        self._last = None
        np.random.set_state(state)


def _numpy_state() -> dict[str, Any]:
    return np.random.get_state(legacy=False)


_PYTHON = Source(random.getstate, random.setstate)
_numpy = _Numpy()
_NUMPY = Source(_numpy.read, _numpy.write)


class Draws:
    """What a call draws from generators that PyTorch does not set back.

    Args:
        among: The generators.
    """

    def __init__(self, among: Sequence[Source]) -> None:
        self._states: list[tuple[Source, Any]] = [(source, source.read()) for source in among]

    def end(self) -> None:
        """Keep the states of before the call, of those generators that it drew from."""
        self._states = [(source, state) for source, state in self._states if not _is_same(source.read(), state)]

    @property
    def drawn(self) -> list[Source]:
        """The generators whose states are kept."""
        return [source for source, _ in self._states]

    def restore(self) -> None:
        """Set the generators back to the states that are kept."""
        for source, state in self._states:
            source.write(state)


@contextlib.contextmanager
def preserved(among: Iterable[Source]) -> Iterator[None]:
    """Set generators back on leaving to what they are now."""
    before = [(source, source.read()) for source in among]
    try:
        yield
    finally:
        for source, state in before:
            source.write(state)


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal; those of NumPy are dictionaries that hold arrays."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)

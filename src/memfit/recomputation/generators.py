"""States of random generators, restored so that a recomputation draws the numbers of the forward pass.

PyTorch's own states are kept for each call, as `torch.utils.checkpoint` does. Generators of Python, of NumPy and of
modules are seldom drawn from: their states are kept only where a call changed them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from memfit._torch import is_fake, is_initialized
from memfit.workload import ForeignGenerator as ForeignGenerator
from memfit.workload import foreign_generator, same_states

_TWISTER_BYTES = 2500  # size of NumPy's Mersenne twister: 624 integers and a position


@dataclasses.dataclass(frozen=True)
class Generators:
    """States of PyTorch's generators, of the CPU and of the devices of some tensors."""

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
        if kind != "cpu" and is_initialized(kind):
            devices, states = get_device_states(*places.values())
        return cls(torch.get_rng_state(), kind, devices, states)

    def are_as_before(self) -> bool:
        """Tell whether the generators still have these states. Fake operators draw nothing."""
        if is_fake(self.cpu):
            return True
        now = [torch.get_rng_state()]
        now += [torch.get_device_module(self.kind).get_rng_state(device) for device in self.devices]
        return all(torch.equal(state, before) for state, before in zip(now, [self.cpu, *self.states], strict=True))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore these states, until the context is left."""
        with torch.random.fork_rng(self.devices, device_type=self.kind if self.devices else "cuda"):
            self.restore()
            yield

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.kind)


def foreign_generators(held: Iterable[Any] = ()) -> list[ForeignGenerator]:
    """Return Python's and NumPy's global generators, and those of PyTorch, Python or NumPy that are given."""
    return [_PYTHON, _NUMPY, *(foreign_generator(generator) for generator in held)]


class _Numpy:
    """NumPy's global generator, whose whole state, slow to read, is read only where its bits changed."""

    def __init__(self) -> None:
        self._last: tuple[object, bytes, dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        bits = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        if not isinstance(bits, np.random.MT19937):
            return np.random.get_state(legacy=False)
        now = ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)
        last = self._last  # the bits do not tell whether the second of two normal numbers is left ("has_gauss")
        if last is None or last[0] is not bits or last[1] != now or last[2]["has_gauss"]:
            self._last = last = bits, now, np.random.get_state(legacy=False)
        return last[2]

    def write(self, state: dict[str, Any]) -> None:
        self._last = None  # the state may differ in more than its bits
        np.random.set_state(state)


_PYTHON = ForeignGenerator(random.getstate, random.setstate)
_numpy = _Numpy()
_NUMPY = ForeignGenerator(_numpy.read, _numpy.write)


class DrawnStates:
    """States of foreign generators as a call begins; after `end`, of those that it drew from."""

    def __init__(self, generators: Sequence[ForeignGenerator]) -> None:
        self._states: list[tuple[ForeignGenerator, Any]] = [(source, source.read()) for source in generators]

    def end(self) -> None:
        """End the call: keep the states of the generators that it drew from."""
        self._states = [(source, state) for source, state in self._states if not same_states(source.read(), state)]

    @property
    def drawn(self) -> list[ForeignGenerator]:
        """The generators whose states are kept."""
        return [source for source, _ in self._states]

    def restore(self) -> None:
        """Restore the kept states."""
        for source, state in self._states:
            source.write(state)


@contextlib.contextmanager
def preserved(generators: Iterable[ForeignGenerator]) -> Iterator[None]:
    """Restore the present states of generators on leaving."""
    before = [(source, source.read()) for source in generators]
    try:
        yield
    finally:
        for source, state in before:
            source.write(state)

"""What a call of a module was given and the state that it ran under, so that it runs again as it ran.

PyTorch's own random states are kept for each call, as `torch.utils.checkpoint` does. Generators of Python, of NumPy and
of modules are seldom drawn from: their states are kept only where a call changed them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from memfit._torch import is_fake, is_initialized, own_buffers, tree_flatten, tree_is_leaf, tree_unflatten
from memfit.workload import ForeignGenerator as ForeignGenerator
from memfit.workload import foreign_generator, same_states

_PLAIN = (type(None), bool, int, float, str)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_TWISTER_BYTES = 2500  # size of NumPy's Mersenne twister: 624 integers and a position


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A numbered placeholder for a tensor."""

    number: int


def mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Return a value with all tensors, or all placeholders, replaced; containers and dataclasses are copied."""
    if isinstance(value, kind):
        return change(value)
    exact = type(value)
    if exact in _PLAIN:
        return value
    if exact is tuple or exact is list:
        return exact([mapped(item, kind, change) for item in value])
    if exact is dict:
        return {key: mapped(item, kind, change) for key, item in value.items()}
    if not tree_is_leaf(value):
        items, spec = tree_flatten(value, is_leaf=lambda item: item is not value)
        return tree_unflatten([mapped(item, kind, change) for item in items], spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Placeholder)):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, mapped(getattr(value, field.name), kind, change))
        return copied
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, repeated ones too, always in the same order."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    mapped(value, torch.Tensor, tensors.append)
    return tensors


class CallState:
    """The state that a call begins under: autocast, the modes of modules, and the states of random generators.

    Args:
        modules: The modules that may run in the call.
        tensors: Its arguments: PyTorch's generators of their devices may be drawn from.
        foreign: Generators besides PyTorch's own that it may draw from.
        draws: Whether it may draw from PyTorch's own.

    Attributes:
        drawn: After `end`, the foreign generators that it drew from.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Iterable[torch.Tensor],
        foreign: Iterable[ForeignGenerator],
        draws: bool = True,
    ) -> None:
        self._modules, self._trains = modules, [module.training for module in modules]
        self.autocast = autocast_state()
        self.cpu: torch.Tensor | None = None
        self.kind, self.devices, self._states = "cpu", list[int](), list[torch.Tensor]()
        if draws:
            places = {t.device: t for t in tensors if t.device.type not in ("cpu", "meta")}
            self.kind = next((device.type for device in places), "cpu")
            if self.kind != "cpu" and is_initialized(self.kind):
                self.devices, self._states = get_device_states(*places.values())
            self.cpu = torch.get_rng_state()
        self._foreign: list[tuple[ForeignGenerator, Any]] = [(source, source.read()) for source in foreign]

    def end(self) -> None:
        """End the call: keep the states of the foreign generators that it drew from."""
        self._foreign = [(source, state) for source, state in self._foreign if not same_states(source.read(), state)]

    @property
    def drawn(self) -> list[ForeignGenerator]:
        return [source for source, _ in self._foreign]

    def forget_undrawn(self) -> None:
        """Forget the states of PyTorch's generators, if they are as before. Fake operators draw nothing."""
        if self.cpu is None:
            return
        if not is_fake(self.cpu):
            now = [torch.get_rng_state()]
            now += [torch.get_device_module(self.kind).get_rng_state(device) for device in self.devices]
            if not all(torch.equal(*pair) for pair in zip(now, [self.cpu, *self._states], strict=True)):
                return
        self.cpu, self.devices, self._states = None, [], []

    def restore(self) -> None:
        """Restore generators and modes."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self._states, device_type=self.kind)
        for source, state in self._foreign:
            source.write(state)
        _set_modes(self._modules, self._trains)


@contextlib.contextmanager
def running_again(
    states: Sequence[CallState], modules: Sequence[nn.Module], normalisations: Sequence[nn.Module]
) -> Iterator[None]:
    """Have calls under one autocast run again, and leave generators, modes and running statistics as they are now.

    The `restore` of each call's state is called before it. In the normalisations a batch counts once.
    """
    drawing = [state for state in states if state.cpu is not None]
    with contextlib.ExitStack() as stack:
        if drawing:
            kind = drawing[0].kind
            devices = {d for state in drawing if state.kind == kind for d in state.devices}
            stack.enter_context(torch.random.fork_rng(sorted(devices), device_type=kind if devices else "cuda"))
        stack.enter_context(preserved({id(s): s for state in states for s in state.drawn}.values()))
        for device, (enabled, dtype, cache) in states[0].autocast.items():
            stack.enter_context(torch.autocast(device, dtype, enabled, cache))
        for module in normalisations:
            for name in _STATISTICS:
                buffer = own_buffers(module)[name]
                stack.callback(own_buffers(module).__setitem__, name, buffer)
                own_buffers(module)[name] = None if buffer is None else buffer.clone()
        stack.callback(_set_modes, modules, [module.training for module in modules])
        yield


def autocast_state() -> dict[str, tuple[bool, torch.dtype, bool]]:
    """Return autocast's switch, dtype and cache, for the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    cache = torch.is_autocast_cache_enabled()
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in kinds}


def _set_modes(modules: Sequence[nn.Module], trains: Sequence[bool]) -> None:
    for module, is_training in zip(modules, trains, strict=True):
        if module.training != is_training:
            module.training = is_training


@contextlib.contextmanager
def preserved(generators: Iterable[ForeignGenerator]) -> Iterator[None]:
    """Restore the present states of generators on leaving."""
    before = [(source, source.read()) for source in generators]
    try:
        yield
    finally:
        for source, state in before:
            source.write(state)


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

"""The global random number generators: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from memfit.errors import CheckpointError

RngState = dict[str, Any]
"""The state of all generators, as JSON values."""


def rng_state() -> RngState:
    """Return the state of the global generators; those of GPUs only if PyTorch has used one."""
    is_gpu_used = torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count() if is_gpu_used else 0)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(torch.cuda.get_rng_state(i)) for i in gpus],
        "python": [version, list(internal), gauss_next],
        "numpy": _listed(np.random.get_state(legacy=False)),
    }


def check_rng_state(state: RngState) -> None:
    """Raise CheckpointError unless the global generators could be set to a state."""
    try:
        version, internal, gauss_next = state["python"]
        random.Random().setstate((version, tuple(internal), gauss_next))
        torch.Generator().set_state(bytes_tensor(state["torch"]))
        for text in state["cuda"]:
            bytes_tensor(text)
        current = np.random.get_state(legacy=False)
        try:
            np.random.set_state(_arrays(state["numpy"]))
        finally:
            np.random.set_state(current)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise CheckpointError(f"the checkpoint's state of the random number generators can't be set: {e}") from e


def set_rng_state(state: RngState) -> None:
    """Set the global generators to a state of `rng_state`. Missing GPUs are ignored."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(bytes_tensor(state["torch"]))
    np.random.set_state(_arrays(state["numpy"]))
    for index, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(bytes_tensor(text), index)


def rng_snapshot() -> Callable[[], None]:
    """Return a function that restores the present state of the global generators; much cheaper than `rng_state`."""
    is_gpu_used = torch.cuda.is_initialized()
    gpus = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count() if is_gpu_used else 0)]
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)

    def set_back() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for index, state in enumerate(gpus):
            torch.cuda.set_rng_state(state, index)

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
    """Return NumPy's state with arrays as lists."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"array", "dtype"}:
        return np.array(value["array"], dtype=value["dtype"])
    return {key: _arrays(item) for key, item in value.items()} if isinstance(value, dict) else value

"""Answers of `torch.cuda` where fake CUDA tensors stand for a named GPU: the catalogue's figures, and no-ops."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from memfit._torch.cuda import answer_for_one_device
from memfit._torch.fake import FakeTensor, FakeTensorMode, fake_tensor
from memfit._torch.foreach import optimizer_types
from memfit.fake_gpu.shim import is_loaded
from memfit.ir.device import Device


def pretend(device: Device) -> None:
    """Make this process look, to the user's code and to PyTorch's own, as if it had one GPU of this kind.

    That holds until the process ends, which is memfit's own (`shim.command`), not the user's.

    Raises:
        RuntimeError: The shim is not loaded in this process.
    """
    if not is_loaded():
        raise RuntimeError("fake CUDA is not loaded in this process: start it by memfit.fake_gpu.shim.command")
    for name, answer in _answers(device).items():
        setattr(torch.cuda, name, answer)
    fake_tensor.init_gpu_context = constant(None)  # type: ignore[assignment]  # it would call the driver
    FakeTensorMode.avoid_device_init = property(constant(True))  # type: ignore[assignment]  # torch.tensor, too
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, constant(None))
    answer_for_one_device()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.Tensor.is_pinned = constant(False)  # type: ignore[method-assign]
    if device.vendor == "nvidia" and torch.version.cuda is None:
        torch.version.cuda = "13.0"
    # Optimizers choose their multi-tensor kernels by the exact type of the parameters.
    if FakeTensor not in optimizer_types:
        optimizer_types.append(FakeTensor)


def _answers(device: Device) -> dict[str, Callable[..., Any]]:
    properties = _properties(device)
    newer = device.capability is None or device.capability >= (8, 0)
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = (
        "_lazy_init",
        "init",
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "reset_max_memory_allocated",
        "reset_peak_memory_stats",
        "seed",
        "set_device",
        "set_per_process_memory_fraction",
        "set_rng_state",
        "set_rng_state_all",
        "set_stream",
        "synchronize",
    )
    return {
        **{name: constant(0) for name in zero},
        **{name: constant(None) for name in nothing},
        "_is_compiled": constant(True),
        "_exchange_device": constant(0),
        "_maybe_exchange_device": constant(0),
        "is_available": constant(True),
        "is_current_stream_capturing": constant(False),
        "is_initialized": constant(True),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or newer,
        "device_count": constant(1),
        "current_device": constant(0),
        "get_device_capability": constant(device.capability or (9, 0)),
        "get_device_name": constant(device.description),
        "get_device_properties": constant(properties),
        "get_arch_list": constant([f"sm_{properties.major}{properties.minor}"]),
        "get_rng_state": _rng_state,
        "get_rng_state_all": lambda: [_rng_state()],
        "mem_get_info": constant((device.usable_bytes, device.memory_bytes)),
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
        "memory_summary": constant(""),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }


def constant(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments that returns the value."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def _properties(device: Device) -> types.SimpleNamespace:
    major, minor = device.capability or (9, 0)
    return types.SimpleNamespace(
        name=device.description,
        major=major,
        minor=minor,
        total_memory=device.memory_bytes,
        multi_processor_count=device.cores,
        warp_size=64 if device.vendor == "amd" else 32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        L2_cache_size=device.cache_bytes,
        gcnArchName=device.name,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _rng_state(*_: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


class _Event:
    """A CUDA event that has always completed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = constant(None)
    query = constant(True)
    elapsed_time = constant(0.0)


class _Stream(_Event):
    """A CUDA stream whose work is always done."""

    cuda_stream = 0
    device_index = 0
    wait_event = wait_stream = __exit__ = constant(None)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

"""Fake CUDA for a named GPU: the operators' kernels, and the answers of `torch.cuda`, which are no-ops or figures."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from memfit._torch.cuda import answer_for_one_device
from memfit._torch.dispatch import has_kernel_for_dispatch_key
from memfit._torch.fake import FakeTensor, FakeTensorMode, fake_tensor
from memfit._torch.operators import optimizer_types
from memfit.fake_gpu import recurrent
from memfit.fake_gpu.attention import Attention, takes_cudnn_first
from memfit.fake_gpu.shim import is_loaded
from memfit.ir.device import Device

_HAVE_KERNELS = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators with a CUDA kernel, which PyTorch's CPU wheel decomposes."""

_WITHOUT_OUTPUT: dict[str, Any] = {
    "_fused_sgd_": None,
    "_fused_sgd_.tensor_lr": None,
    "_use_cudnn_ctc_loss": False,
    "_use_cudnn_ctc_loss.Tensor": False,
    "_use_miopen_ctc_loss": False,
    "_use_miopen_ctc_loss.Tensor": False,
}
"""Return values of operators that allocate nothing and have no kernel for fake tensors."""

_library: torch.library.Library | None = None  # lives as long as the process
_attention: Attention | None = None


def fake_gpu(device: Device) -> Attention:
    """Make this process look as if it had a GPU, and return its attention.

    Raises:
        RuntimeError: Fake CUDA is not loaded in this process.
    """
    global _library, _attention
    _pretend(device)
    if _library is None or _attention is None:
        _library, _attention = torch.library.Library("aten", "IMPL"), Attention(device)
        _attention.register(_library)
        recurrent.register(_library)
        for name in _HAVE_KERNELS:
            if not has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                _library.impl(name, _no_data, "CUDA")
        for name, value in _WITHOUT_OUTPUT.items():
            if not has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                _library.impl(name, _constant(value), "Meta")
    _attention.device = device
    return _attention


def runs_alike(device: Device, other: Device) -> bool:
    """Tell whether what was captured for a device so far would be the same program on another.

    It is where every attention takes the same kernel, and the answers that programs choose by are alike: the vendor,
    and whether the GPU is of Ampere's generation or later.
    """
    if _generation(device) != _generation(other):
        return False
    if _attention is None or device.kind != "cuda":
        return True
    _attention.device = device
    return _attention.runs_alike(other)


def family(device: Device) -> tuple[object, ...]:
    """Return a key of a device: those that run one program mostly share it, and no capture is needed."""
    return (*_generation(device), takes_cudnn_first(device))


def _generation(device: Device) -> tuple[str, str, bool]:
    return device.kind, device.vendor, device.capability is None or device.capability >= (8, 0)


def _no_data(*_: Any, **__: Any) -> None:
    raise RuntimeError("a kernel was called on fake tensors, which have no data")


def _pretend(device: Device) -> None:
    """Make this process look, to the user's code and to PyTorch's own, as if it had one GPU of this kind.

    That holds until the process ends, which is memfit's own (`shim.command`), not the user's.

    Raises:
        RuntimeError: The shim is not loaded in this process.
    """
    if not is_loaded():
        raise RuntimeError("fake CUDA is not loaded in this process: start it by memfit.fake_gpu.shim.command")
    for name, answer in _answers(device).items():
        setattr(torch.cuda, name, answer)
    fake_tensor.init_gpu_context = _constant(None)  # type: ignore[assignment]  # it would call the driver
    FakeTensorMode.avoid_device_init = property(_constant(True))  # type: ignore[assignment]  # torch.tensor, too
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _constant(None))
    answer_for_one_device()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.Tensor.is_pinned = _constant(False)  # type: ignore[method-assign]
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
        **{name: _constant(0) for name in zero},
        **{name: _constant(None) for name in nothing},
        "_is_compiled": _constant(True),
        "_exchange_device": _constant(0),
        "_maybe_exchange_device": _constant(0),
        "is_available": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "is_initialized": _constant(True),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or newer,
        "device_count": _constant(1),
        "current_device": _constant(0),
        "get_device_capability": _constant(device.capability or (9, 0)),
        "get_device_name": _constant(device.description),
        "get_device_properties": _constant(properties),
        "get_arch_list": _constant([f"sm_{properties.major}{properties.minor}"]),
        "get_rng_state": _rng_state,
        "get_rng_state_all": lambda: [_rng_state()],
        "mem_get_info": _constant((device.usable_bytes, device.memory_bytes)),
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
        "memory_summary": _constant(""),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
    }


def _constant(value: Any) -> Callable[..., Any]:
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

    record = wait = synchronize = _constant(None)
    query = _constant(True)
    elapsed_time = _constant(0.0)


class _Stream(_Event):
    """A CUDA stream whose work is always done."""

    cuda_stream = 0
    device_index = 0
    wait_event = wait_stream = __exit__ = _constant(None)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

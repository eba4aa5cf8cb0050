"""Fake CUDA for a named GPU: the operators' kernels, and the answers of `torch.cuda`, which are no-ops or figures.

Recurrent layers run by cuDNN's operators, as PyTorch runs them on a GPU: its CPU wheel does not dispatch to these, and
the CUDA wheel calls the driver. cuDNN's operators stand for MIOpen's too, which differ in name only.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit._torch import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    answer_for_one_device,
    call_at,
    fake_tensor,
    has_kernel_for_dispatch_key,
    optimizer_types,
)
from memfit.hardware.attention import AttentionKernels, takes_cudnn_first
from memfit.hardware.shim import is_loaded
from memfit.ir import Device

_HAVE_KERNELS = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators with a CUDA kernel, which PyTorch's CPU wheel decomposes."""

_WITHOUT_OUTPUT: dict[str, Any] = {
    **dict.fromkeys(("_fused_sgd_", "_fused_sgd_.tensor_lr"), None),
    **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"), False),
    **dict.fromkeys(("_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"), False),
}
"""Return values of operators that allocate nothing and have no kernel for fake tensors."""

_library: torch.library.Library | None = None  # lives as long as the process
_attention: AttentionKernels | None = None


def fake_gpu(device: Device) -> AttentionKernels:
    """Make this process look, to the user's code and to PyTorch's own, as if it had one GPU; return its attention.

    That holds until the process ends, which is memfit's own (`shim.command`), not the user's.

    Raises:
        RuntimeError: Fake CUDA is not loaded in this process.
    """
    global _library, _attention
    if not is_loaded():
        raise RuntimeError("fake CUDA is not loaded in this process: start it by memfit.hardware.shim.command")
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
    if _library is None or _attention is None:
        _library, _attention = torch.library.Library("aten", "IMPL"), AttentionKernels(device)
        _attention.register(_library)
        for name, mode in _MODES.items():
            _library.impl(f"{name}.input", _layer(name, mode, is_packed=False), "AutogradCUDA")
            _library.impl(f"{name}.data", _layer(name, mode, is_packed=True), "AutogradCUDA")
        _library.impl("_cudnn_rnn_backward", _backward, "Meta")
        flop_registry[_aten._cudnn_rnn] = lambda *given, **_: _flops(given)
        flop_registry[_aten._cudnn_rnn_backward] = lambda *given, **_: 2 * _flops(given)
        for name in _HAVE_KERNELS:
            if not has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                _library.impl(name, _no_data, "CUDA")
        for name, value in _WITHOUT_OUTPUT.items():
            if not has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                _library.impl(name, _constant(value), "Meta")
    _attention.device = device
    return _attention


def runs_alike(device: Device, other: Device) -> bool:
    """Tell whether the program captured for a device so far is the same on another.

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
    """Return a key of a device, found without a capture: devices of one key mostly run one program."""
    return (*_generation(device), takes_cudnn_first(device))


def _generation(device: Device) -> tuple[str, str, bool]:
    return device.kind, device.vendor, device.capability is None or device.capability >= (8, 0)


def _no_data(*_: Any, **__: Any) -> None:
    raise RuntimeError("a kernel was called on fake tensors, which have no data")


def _answers(device: Device) -> dict[str, Callable[..., Any]]:
    major, minor = device.capability or (9, 0)
    properties = types.SimpleNamespace(
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
    newer = device.capability is None or device.capability >= (8, 0)
    zero = "_exchange_device _maybe_exchange_device current_device max_memory_allocated max_memory_reserved"
    zero += " memory_allocated memory_reserved"
    nothing = "_lazy_init empty_cache init ipc_collect manual_seed manual_seed_all reset_max_memory_allocated"
    nothing += " reset_peak_memory_stats seed set_device set_per_process_memory_fraction set_rng_state"
    nothing += " set_rng_state_all set_stream synchronize"
    return {
        **dict.fromkeys(zero.split(), _constant(0)),
        **dict.fromkeys(nothing.split(), _constant(None)),
        "_is_compiled": _constant(True),
        "is_available": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "is_initialized": _constant(True),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or newer,
        "device_count": _constant(1),
        "get_device_capability": _constant((major, minor)),
        "get_device_name": _constant(device.description),
        "get_device_properties": _constant(properties),
        "get_arch_list": _constant([f"sm_{major}{minor}"]),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "get_rng_state_all": lambda: [torch.cuda.get_rng_state()],
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
    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


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


_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # `torch.backends.cudnn.rnn.get_cudnn_mode`
_RESERVED = (1, 1, 5, 6)
"""The size of cuDNN's reserve space of a layer, in hidden states for each time step, by mode.

From reserve sizes in pytorch/pytorch#2895 (cuDNN 7): 736 MB for an LSTM and 864 MB for a GRU with 4 layers of 320
features over 25,000 steps in float32, which includes the outputs of the first 3. Not yet measured on later versions.
"""


def reserve_bytes(
    x: torch.Tensor, mode: int, hidden_size: int, layers: int, dropout: float, bidirectional: bool
) -> int:
    """Return the bytes of cuDNN's reserve space for the backward pass, with byte masks for dropout between layers."""
    states = math.prod(x.shape[:-1]) * hidden_size * (2 if bidirectional else 1)
    masks = (layers - 1) * states if dropout else 0
    return states * (layers * _RESERVED[mode] + layers - 1) * x.itemsize + masks


def with_reserve(out: Any, args: Any) -> Any:
    """Return the outputs of a fake `_cudnn_rnn` with a reserve space, which PyTorch's fake kernel leaves empty."""
    mode, hidden_size, layers, dropout, train, bidirectional = (args[i] for i in (6, 7, 9, 11, 12, 13))
    nbytes = reserve_bytes(args[0], mode, hidden_size, layers, dropout, bidirectional) if train else 0
    return *out[:3], out[3].new_empty(nbytes), out[4]


def _layer(name: str, mode: int, is_packed: bool) -> Callable[..., Any]:
    """Return the kernel for samples of equal length, or for a packed sequence, whose lengths are on the CPU."""
    composite = getattr(getattr(_aten, name), "data" if is_packed else "input")

    def run(x: torch.Tensor, *given: Any) -> Any:
        if not torch.backends.cudnn.enabled:
            return call_at(composite, DispatchKey.CompositeImplicitAutograd, x, *given)
        if is_packed:
            lengths, hx, params, *options = given
            return _cudnn(name, mode, x, hx, params, (*options, False), lengths.tolist())
        hx, params, *options = given
        return _cudnn(name, mode, x, hx, params, options, [])

    return run


def _cudnn(
    name: str, mode: int, x: torch.Tensor, hx: Any, params: list[torch.Tensor], options: Any, lengths: list[int]
) -> Any:
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    states = list(hx) if name == "lstm" else [hx]
    size, out_size = states[-1].shape[2], states[0].shape[2]
    projected = size != out_size
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, *states = (t.to(dtype) for t in (x, *states))
        params = _flattened(params, dtype)
    count = (4 if has_biases else 2) + projected
    sizes = (mode, size, out_size if projected else 0, layers, batch_first, dropout, train, bidirectional)
    cell = states[1] if name == "lstm" else None
    with torch.autocast("cuda", enabled=False):
        # The module keeps its weights in one buffer (`flatten_parameters`): any weight stands for the buffer.
        out = _aten._cudnn_rnn(x, params, count, params[0].detach(), states[0], cell, *sizes, lengths, None)
    return out[:3] if name == "lstm" else out[:2]


def _flattened(params: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return weights copied to one buffer in another dtype, as by autocast (`AutocastRNN.cpp`)."""
    ends = list(itertools.accumulate(p.numel() for p in params))
    flat = params[0].new_empty(ends[-1], dtype=dtype)
    return [flat[end - p.numel() : end].view_as(p).copy_(p) for end, p in zip(ends, params, strict=True)]


def _backward(*given: Any) -> Any:
    """Return the outputs of `_cudnn_rnn_backward`: the weights' gradients are views of one buffer."""
    x, weights, hx, cx, wanted = given[0], given[1], given[4], given[5], given[21]
    gradients: list[Any] = [None] * len(weights)
    if wanted[3]:
        sizes = [w.numel() for w in weights]
        parts = x.new_empty(sum(sizes)).split_with_sizes(sizes)
        gradients = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
    states = [
        torch.empty_like(t) if t is not None and asked else None for t, asked in zip((x, hx, cx), wanted, strict=False)
    ]
    return *states, gradients


def _flops(given: Any) -> int:
    """Return the FLOPs of a layer: every weight matrix multiplies every time step of every sample."""
    steps: int = math.prod(given[0].shape[:-1])
    return 2 * steps * sum(int(w.numel()) for w in given[1] if w.dim() == 2)

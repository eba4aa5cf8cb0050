"""Fake CUDA for a named GPU: the operators' kernels, and the answers of `torch.cuda`, which are no-ops or figures.

Recurrent layers run by cuDNN's operators, as PyTorch runs them on a GPU: its CPU wheel does not dispatch to these, and
the CUDA wheel calls the driver. cuDNN's operators stand for MIOpen's too, which differ in name only.

[Attention] Which kernel `scaled_dot_product_attention` runs is PyTorch's rule (2.11 to 2.13),
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend` and the `can_use_*_attention` functions):
kernels are tried in order of priority, and the first whose constraints hold runs.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F
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
    torch_version,
)
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
_aten = torch.ops.aten


def fake_gpu(device: Device) -> AttentionKernels:
    """Make this process look, to the user's code and to PyTorch's own, as if it had one GPU; return its attention.

    That holds until the process ends, which is memfit's own (`shim.command`), not the user's.
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
        # Below autocast and above autograd, as recomputations need it.
        _library.impl("scaled_dot_product_attention", _attention.run, "AutogradCUDA")
        for name, mode in _MODES.items():
            _library.impl(f"{name}.input", _layer(name, mode, is_packed=False), "AutogradCUDA")
            _library.impl(f"{name}.data", _layer(name, mode, is_packed=True), "AutogradCUDA")
        _library.impl("_cudnn_rnn_backward", _backward, "Meta")
        flop_registry[_aten._cudnn_rnn] = lambda *given, **_: _flops(given)
        flop_registry[_aten._cudnn_rnn_backward] = lambda *given, **_: 2 * _flops(given)

        def no_data(*_: Any, **__: Any) -> None:
            raise RuntimeError("a kernel was called on fake tensors, which have no data")

        for name in _HAVE_KERNELS:
            if not has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                _library.impl(name, no_data, "CUDA")
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


# Recurrent layers

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
            return _by_cudnn(name, mode, x, hx, params, (*options, False), lengths.tolist())
        hx, params, *options = given
        return _by_cudnn(name, mode, x, hx, params, options, [])

    return run


def _by_cudnn(
    name: str, mode: int, x: torch.Tensor, hx: Any, params: list[torch.Tensor], options: Any, lengths: list[int]
) -> Any:
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    states = list(hx) if name == "lstm" else [hx]
    size, out_size = states[-1].shape[2], states[0].shape[2]
    projected = size != out_size
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, *states = (t.to(dtype) for t in (x, *states))
        # The weights are copied to one buffer, as by autocast (`AutocastRNN.cpp`).
        ends = list(itertools.accumulate(p.numel() for p in params))
        flat = params[0].new_empty(ends[-1], dtype=dtype)
        params = [flat[end - p.numel() : end].view_as(p).copy_(p) for end, p in zip(ends, params, strict=True)]
    count = (4 if has_biases else 2) + projected
    sizes = (mode, size, out_size if projected else 0, layers, batch_first, dropout, train, bidirectional)
    cell = states[1] if name == "lstm" else None
    with torch.autocast("cuda", enabled=False):
        # The module keeps its weights in one buffer (`flatten_parameters`): any weight stands for the buffer.
        out = _aten._cudnn_rnn(x, params, count, params[0].detach(), states[0], cell, *sizes, lengths, None)
    return out[:3] if name == "lstm" else out[:2]


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


# Attention

Kernel = Literal["cudnn", "flash", "efficient", "math"]
_NAMES: dict[Kernel, str] = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient", "math": "math"}
_HALF = (torch.float16, torch.bfloat16)
_DIMENSION = 65535  # cuDNN's limit of samples, and of heads


@dataclass(frozen=True)
class AttentionCall:
    """The properties of a call of `scaled_dot_product_attention` that the choice of its kernel depends on.

    Attributes:
        query: Shape [batch, heads, length, head size], as those of key and value.
        mask: Shape of the explicit mask; None without one.
        same_dtypes: Whether key and value have the query's dtype.
        last_strides_are_1: Whether the last dimensions of all tensors, the mask included, are contiguous.
        needs_gradient: Whether query, key or value require a gradient.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    dropout: float = 0.0
    is_causal: bool = False
    mask: tuple[int, ...] | None = None
    mask_needs_gradient: bool = False
    same_dtypes: bool = True
    last_strides_are_1: bool = True
    enable_gqa: bool = False
    needs_gradient: bool = True


def chosen_kernel(call: AttentionCall, device: Device) -> tuple[Kernel, dict[Kernel, str]]:
    """Return the kernel that runs, and the reasons why kernels of a higher priority do not; RuntimeError for none."""
    reasons: dict[Kernel, str] = {}
    # cuDNN (above 9.15) is first on Hopper and data-centre Blackwell, else last.
    order: list[Kernel] = ["flash", "efficient", "math"]
    order.insert(0 if takes_cudnn_first(device) else len(order), "cudnn")
    for kernel in order:
        is_on, check = _CHECKS[kernel]
        why = next(check(call, device), None) if is_on() else "it is switched off"
        if why is None:
            return kernel, reasons
        reasons[kernel] = why
    listed = "; ".join(f"{_NAMES[kernel]}: {why}" for kernel, why in reasons.items())
    raise RuntimeError(f"no attention kernel of {device.name} accepts this call ({listed})")


def takes_cudnn_first(device: Device) -> bool:
    """Tell whether a device's first choice for attention is cuDNN's kernel."""
    cudnn_is_last = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return device.capability in ((9, 0), (10, 0), (10, 3)) and not cudnn_is_last


def _common(call: AttentionCall) -> Iterator[str]:
    shapes = (call.query, call.key, call.value)
    if any(len(shape) != 4 for shape in shapes):
        yield f"it needs four dimensions, not {'/'.join(str(len(shape)) for shape in shapes)}"
        return
    if call.query[-2] == 0 or call.key[-2] == 0:
        yield "it accepts no empty sequences"
    if not call.last_strides_are_1:
        yield "it needs a contiguous last dimension"
    if len({shape[0] for shape in shapes}) > 1:
        yield "it needs as many samples of keys as of queries"


def _heads(call: AttentionCall, grouped: bool, same: bool = True) -> Iterator[str]:
    """Yield the reasons in the numbers of heads; with `same`, grouped queries need equal heads of keys and values."""
    queries, keys, values = call.query[1], call.key[1], call.value[1]
    if grouped and call.enable_gqa:
        if (same and keys != values) or queries % keys or queries % values:
            yield f"its heads of keys ({keys}) and values ({values}) must divide those of queries ({queries})"
    elif not queries == keys == values:
        yield f"it needs as many heads of keys ({keys}) as of queries ({queries})"


def _flash(call: AttentionCall, device: Device) -> Iterator[str]:
    yield from _common(call)
    if device.vendor == "nvidia" and not _is_between(device, (8, 0), (12, 1)):
        yield "it needs an Ampere GPU (sm_80) or newer"
    if call.mask is not None:
        yield "it accepts no mask"
    yield from _one_head_size(call, device)
    if call.dtype not in _HALF or not call.same_dtypes:
        yield f"it accepts float16 or bfloat16, not {str(call.dtype)[6:]}"
    if call.is_causal and call.query[-2] != call.key[-2]:
        yield "it accepts is_causal=True only with as many queries as keys"
    consumer = _is_between(device, (8, 6), (8, 9)) or _is_between(device, (12, 0), (12, 1))
    size = call.query[-1]
    if call.needs_gradient and consumer and (192 < size <= 224 or (size > 224 and call.dropout > 0)):
        yield f"its backward pass accepts no head size of {size} on this GPU"
    yield from _heads(call, grouped=True)


def _one_head_size(call: AttentionCall, device: Device) -> Iterator[str]:
    sizes = {call.query[-1], call.key[-1], call.value[-1]}
    limit = 512 if device.vendor == "amd" else 256
    if len(sizes) > 1 or max(sizes) > limit:
        yield f"it needs one head size of at most {limit}, not {sorted(sizes)}"


def _efficient(call: AttentionCall, device: Device) -> Iterator[str]:
    yield from _common(call)
    if device.vendor == "amd":  # the same library as flash
        yield from _one_head_size(call, device)
    else:  # `minimum_gemm_alignment`: 16 bytes for tensor cores
        half = call.dtype in _HALF
        alignment = (8 if half else 4) if _is_between(device, (8, 0), (99, 0)) else 8 if half else 1
        if call.query[-1] != call.key[-1] or call.query[-1] % alignment or call.value[-1] % alignment:
            yield f"it needs head sizes that are multiples of {alignment}, not {call.query[-1]} and {call.value[-1]}"
    newer = device.vendor == "amd" or _is_between(device, (8, 0), (99, 0))
    allowed = (torch.float16, torch.float32, torch.bfloat16) if newer else (torch.float16, torch.float32)
    if call.dtype not in allowed or not call.same_dtypes:
        yield f"it accepts no {str(call.dtype)[6:]} on this GPU"
    yield from _heads(call, grouped=False)


def _cudnn(call: AttentionCall, device: Device) -> Iterator[str]:
    if device.vendor != "nvidia" or not _is_between(device, (8, 0), (12, 1)):
        yield "it needs an NVIDIA GPU of sm_80 or newer"
    yield from _common(call)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield "it is not deterministic"
    if call.dtype not in _HALF or not call.same_dtypes:
        yield f"it accepts float16 or bfloat16, not {str(call.dtype)[6:]}"
    # A mask must have two or four dimensions that broadcast to the scores (`check_attn_mask_shape`).
    mask, scores = call.mask or (), (*call.query[:3], call.key[2])
    broadcasts = all(m in (1, n) for m, n in zip(reversed(mask), reversed(scores), strict=False))
    if call.mask is not None and (len(mask) not in (2, 4) or call.mask_needs_gradient or not broadcasts):
        yield f"it accepts no mask of shape {list(call.mask or ())}, nor one that needs a gradient"
    if torch_version() >= (2, 12) and (call.dropout * 16) % 1:
        yield f"it needs a dropout that is a multiple of 1/16, not {call.dropout:g}"
    yield from _heads(call, grouped=True, same=False)
    if max(call.query[:2]) > _DIMENSION:
        yield f"it accepts at most {_DIMENSION} samples and heads"
    deepseek = (
        device.capability is not None and device.capability[0] == 10 and (call.query[3], call.value[3]) == (192, 128)
    )
    limit = 256 if device.capability == (9, 0) else 192 if deepseek else 128
    sizes = {call.query[3], call.value[3]}
    if max(sizes) > limit or any(size % 8 for size in sizes):
        yield f"it needs head sizes that are multiples of 8 up to {limit}, not {sorted(sizes)}"
    if call.key[2] == 1 or (call.query[2] == 1 and call.dropout > 0):
        yield "it accepts no sequence of length 1"


_Check = Callable[[AttentionCall, Device], Iterator[str]]
_CHECKS: dict[Kernel, tuple[Callable[[], bool], _Check]] = {
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, _cudnn),
    "flash": (torch.backends.cuda.flash_sdp_enabled, _flash),
    "efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, _efficient),
    "math": (torch.backends.cuda.math_sdp_enabled, lambda call, device: iter(())),
}
"""For each kernel, whether it is switched on, and the reasons against it."""


def _is_between(device: Device, low: tuple[int, int], high: tuple[int, int]) -> bool:
    return device.capability is not None and low <= device.capability <= high


class AttentionKernels:
    """`scaled_dot_product_attention` for fake CUDA tensors, which calls the chosen kernel's own operator.

    Without it fake tensors take the math kernel, which allocates the whole matrix of scores.

    Attributes:
        chosen: The number of calls of each kernel, with the reason against a faster one.
        calls: The distinct calls so far, of all devices.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.chosen: Counter[tuple[Kernel, str]] = Counter()
        self.calls: set[AttentionCall] = set()

    def runs_alike(self, device: Device) -> bool:
        """Tell whether every call so far takes the same kernel on another device."""
        try:
            return all(chosen_kernel(call, device)[0] == chosen_kernel(call, self.device)[0] for call in self.calls)
        except RuntimeError:  # one of them has no kernel
            return False

    def notes(self) -> list[str]:
        """Return the chosen kernels as notes for the user."""
        return [
            f"attention on {self.device.name}: {'1 call uses' if count == 1 else f'{count} calls use'} the"
            f" {_NAMES[kernel]} kernel{why and ': '}{why}"
            for (kernel, why), count in self.chosen.items()
        ]

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Run a call on CUDA tensors."""
        tensors, scale, enable_gqa = (query, key, value), options.get("scale"), options.get("enable_gqa", False)
        call = AttentionCall(
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            dtype=query.dtype,
            dropout=dropout_p,
            is_causal=is_causal,
            mask=None if attn_mask is None else tuple(attn_mask.shape),
            mask_needs_gradient=attn_mask is not None and attn_mask.requires_grad,
            same_dtypes=len({t.dtype for t in tensors}) == 1,
            last_strides_are_1=all(t.stride(-1) == 1 for t in (*tensors, attn_mask) if t is not None),
            enable_gqa=enable_gqa,
            needs_gradient=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        )
        kernel, reasons = chosen_kernel(call, self.device)
        self.calls.add(call)
        why = f"not flash since {reasons['flash']}" if kernel == "efficient" else ""  # against a leaner one
        if kernel == "math":
            listed = "; ".join(f"not {_NAMES[k]} since {reason}" for k, reason in reasons.items())
            why = f"{listed}; it allocates the whole matrix of scores"
        self.chosen[kernel, why] += 1
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, zero - math.inf)
        out: torch.Tensor
        if kernel == "flash":  # with head sizes padded to multiples of 8, as the dispatcher does
            size = query.shape[-1]
            if padding := -size % 8:
                query, key, value = (F.pad(t, (0, padding)) for t in tensors)
            scale = 1 / math.sqrt(size) if scale is None else scale
            flash = _aten._scaled_dot_product_flash_attention
            out = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :size] if padding else out
        if kernel == "math":
            math_kernel = _aten._scaled_dot_product_attention_math
            out = math_kernel(*tensors, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
            return out
        if attn_mask is not None:
            length = attn_mask.shape[-1]
            if kernel == "efficient" and length % 16:  # it needs rows padded to multiples of 16 elements
                attn_mask = F.pad(attn_mask, (0, -length % 16))[..., :length]
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[-2])
        given = (*tensors, attn_mask, call.needs_gradient, dropout_p, is_causal)
        if kernel == "efficient":
            out = _aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]
        else:
            out = _aten._scaled_dot_product_cudnn_attention(*given, False, scale=scale)[0]
        return out

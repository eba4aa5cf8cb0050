"""The choice of the kernel that `scaled_dot_product_attention` runs on a GPU, for fake CUDA tensors.

The rule is PyTorch's (2.11 to 2.13), `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend` and
the `can_use_*_attention` functions): kernels are tried in order of priority, and the first whose constraints hold runs.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from memfit._torch import versions
from memfit.ir import Device

Kernel = Literal["cudnn", "flash", "efficient", "math"]
_NAMES: dict[Kernel, str] = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient", "math": "math"}
_HALF = (torch.float16, torch.bfloat16)
_DIMENSION = 65535  # cuDNN's limit of samples, and of heads
_aten = torch.ops.aten


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


def choose(call: AttentionCall, device: Device) -> tuple[Kernel, dict[Kernel, str]]:
    """Return the kernel that runs, and the reasons why kernels of a higher priority do not.

    Raises:
        RuntimeError: No kernel can run, since the math kernel is switched off.
    """
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
    if versions.running() >= (2, 12) and (call.dropout * 16) % 1:
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
            return all(choose(call, device)[0] == choose(call, self.device)[0] for call in self.calls)
        except RuntimeError:  # one of them has no kernel
            return False

    def register(self, library: torch.library.Library) -> None:
        """Run every call on CUDA tensors from now on: below autocast and above autograd, as recomputations need it."""
        library.impl("scaled_dot_product_attention", self._run, "AutogradCUDA")

    def notes(self) -> list[str]:
        """Return the chosen kernels as notes for the user."""
        return [
            f"attention on {self.device.name}: {'1 call uses' if count == 1 else f'{count} calls use'} the"
            f" {_NAMES[kernel]} kernel{why and ': '}{why}"
            for (kernel, why), count in self.chosen.items()
        ]

    def _run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
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
        kernel, reasons = choose(call, self.device)
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

"""Registration of the kernels with which fake CUDA tensors run the operators that a GPU runs."""

from __future__ import annotations

from typing import Any

import torch

from memfit._torch.dispatch import has_kernel_for_dispatch_key
from memfit.fake_gpu import recurrent
from memfit.fake_gpu.attention import Attention, takes_cudnn_first
from memfit.fake_gpu.cuda_answers import constant, pretend
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
    pretend(device)
    if _library is None or _attention is None:
        _library, _attention = torch.library.Library("aten", "IMPL"), Attention(device)
        _attention.register(_library)
        recurrent.register(_library)
        for name in _HAVE_KERNELS:
            if not has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                _library.impl(name, _no_data, "CUDA")
        for name, value in _WITHOUT_OUTPUT.items():
            if not has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                _library.impl(name, constant(value), "Meta")
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

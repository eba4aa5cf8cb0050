"""Recurrent layers on fake CUDA tensors, by cuDNN's operators, as PyTorch runs them on a GPU.

PyTorch's CPU wheel does not dispatch to these operators, and the CUDA wheel calls the driver. cuDNN's operators stand
for MIOpen's too, which differ in name only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit._torch.dispatch import DispatchKey
from memfit._torch.operators import call_at

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # `torch.backends.cudnn.rnn.get_cudnn_mode`
_RESERVED = (1, 1, 5, 6)
"""The size of cuDNN's reserve space of a layer, in hidden states for each time step, by mode.

From reserve sizes in pytorch/pytorch#2895 (cuDNN 7): 736 MB for an LSTM and 864 MB for a GRU with 4 layers of 320
features over 25,000 steps in float32, which includes the outputs of the first 3. Not yet measured on later versions.
"""


def register(library: torch.library.Library) -> None:
    """Register recurrent layers on CUDA tensors, and the fake kernels and FLOPs of cuDNN's operators."""
    for name, mode in _MODES.items():
        library.impl(f"{name}.input", _layer(name, mode, is_packed=False), "AutogradCUDA")
        library.impl(f"{name}.data", _layer(name, mode, is_packed=True), "AutogradCUDA")
    library.impl("_cudnn_rnn_backward", _backward, "Meta")
    flop_registry[_aten._cudnn_rnn] = lambda *given, **_: _flops(given)
    flop_registry[_aten._cudnn_rnn_backward] = lambda *given, **_: 2 * _flops(given)


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

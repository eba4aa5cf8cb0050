"""Layers with parameters that random programs are made of: each is made for the tensor that it first gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.fuzzing.operators import floating

Tensor = torch.Tensor


class _Layer(nn.Module):
    """A layer that takes any tensor: its last dimension is the features, of three dimensions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _taken(self, x: Tensor) -> Tensor:
        x = floating(x)
        parameter = next(self.inner.parameters(), None)
        same = parameter is None or torch.is_autocast_enabled("cpu") or x.dtype == parameter.dtype
        return _square(x if same or parameter is None else x.to(parameter.dtype))

    def forward(self, x: Tensor) -> Any:
        return self.inner(self._taken(x))


class _Recurrent(_Layer):
    """A recurrent layer: its outputs, or its last state."""

    def __init__(self, inner: nn.Module, last: bool) -> None:
        super().__init__(inner)
        self.last = last

    def forward(self, x: Tensor) -> Any:
        outputs, state = self.inner(self._taken(x))
        state = state[0] if isinstance(state, tuple) else state
        return state.transpose(0, 1) if self.last else outputs


class _Attention(_Layer):
    """Attention of a sequence to itself; with its weights or without."""

    def __init__(self, inner: nn.Module, weights: bool) -> None:
        super().__init__(inner)
        self.weights = weights

    def forward(self, x: Tensor) -> Any:
        y = self._taken(x)
        out, weights = self.inner(y, y, y, need_weights=self.weights)
        return (out, weights) if self.weights else out


class _Channels(_Layer):
    """A layer whose channels are the second dimension of its input, which has one more at the end."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(self._taken(x).unsqueeze(-1)).flatten(2)


class _Looked(nn.Module):
    """An embedding of the places of the largest elements."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(_square(floating(x)).detach().argmax(-1))


class _Scaled(nn.Module):
    """A scale and a shift that broadcast; the scale may be kept in another precision."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return floating(x) * self.scale + self.shift


class _Averaged(nn.Module):
    """A running mean that is taken off: written in place, or replaced."""

    mean: Tensor

    def __init__(self, features: int, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Any:
        new = floating(x).detach().float().flatten(0, -2).mean(0)
        if self.in_place:
            self.mean.mul_(0.9).add_(new, alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * new
        return x - 0.1 * self.mean


def _square(x: Tensor) -> Tensor:
    return x.flatten(1, -2) if x.dim() > 3 else x if x.dim() == 3 else x.unsqueeze(1)


def _heads(features: int) -> int:
    return 2 if features % 2 == 0 else 1


def _linear(x: Tensor, n: int) -> nn.Module:
    return _Layer(nn.Linear(x.shape[-1], [x.shape[-1], 2 * x.shape[-1], 8][n % 3], bias=n % 2 == 0))


def _convolution(x: Tensor, n: int) -> nn.Module:
    c = x.shape[1]
    convolutions: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv1d(c, c, 3, padding=1),
        lambda: nn.Conv1d(c, 4, 1),
        lambda: nn.ConvTranspose1d(c, 8, 2, 2),
        lambda: nn.Conv1d(c, c, 3, padding=1, groups=c),
    ]
    return _Layer(convolutions[n % 4]())


def _recurrent(x: Tensor, n: int) -> nn.Module:
    kind: Any = [nn.LSTM, nn.GRU, nn.RNN][n % 3]
    return _Recurrent(
        kind(x.shape[-1], 8, num_layers=1 + n % 2, batch_first=True, bidirectional=n % 4 == 3), n % 5 == 4
    )


def _normalisation(x: Tensor, n: int) -> nn.Module:
    norms: list[Callable[[], nn.Module]] = [
        lambda: _Layer(nn.LayerNorm(x.shape[-1])),
        lambda: _Layer(nn.BatchNorm1d(x.shape[1])),
        lambda: _Layer(nn.GroupNorm(1, x.shape[1])),
        lambda: _Layer(nn.RMSNorm(x.shape[-1])),
        lambda: _Layer(nn.LayerNorm(x.shape[-1], elementwise_affine=False)),
        lambda: _Layer(nn.InstanceNorm1d(x.shape[1], affine=True)) if x.shape[-1] > 1 else _Layer(nn.Identity()),
        lambda: _Layer(nn.BatchNorm1d(x.shape[1], track_running_stats=False)),
        lambda: _Channels(nn.BatchNorm2d(x.shape[1])),
    ]
    return norms[n % 8]()


def _parametrised(x: Tensor, n: int) -> nn.Module:
    inner: nn.Module = nn.Linear(x.shape[-1], 8)
    change: Any = [parametrizations.weight_norm, parametrizations.spectral_norm][n % 2]
    return _Layer(change(inner))


def _encoder(x: Tensor, n: int) -> nn.Module:
    d = x.shape[-1]
    return _Layer(
        nn.TransformerEncoderLayer(d, _heads(d), 2 * d, dropout=0.1 * (n % 2), batch_first=True, norm_first=n % 4 > 1)
    )


def _sequence(x: Tensor, n: int) -> nn.Module:
    d = x.shape[-1]
    return _Layer(
        nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=n % 2 == 0), nn.Dropout(0.1 * (n % 3)), nn.Linear(d, d))
    )


LAYERS: dict[str, Callable[[Tensor, int], nn.Module]] = {
    "Linear": _linear,
    "Conv": _convolution,
    "Recurrent": _recurrent,
    "Norm": _normalisation,
    "Attention": lambda x, n: _Attention(
        nn.MultiheadAttention(x.shape[-1], _heads(x.shape[-1]), batch_first=True), n % 2 == 1
    ),
    "Encoder": _encoder,
    "Sequence": _sequence,
    "PReLU": lambda x, n: _Layer(nn.PReLU()),
    "Dropout": lambda x, n: _Layer(nn.Dropout(0.2, inplace=n % 2 == 1)),
    "Embedding": lambda x, n: _Looked(nn.Embedding(max(2, x.shape[-1]), 8, padding_idx=0 if n % 2 else None)),
    "Scale": lambda x, n: _Scaled(x.shape[-1], [torch.float32, torch.float64, torch.bfloat16][n % 3]),
    "Average": lambda x, n: _Averaged(x.shape[-1], n % 2 == 0),
    "Parametrised": _parametrised,
}


def layer(name: str, x: Tensor, n: int) -> nn.Module:
    """Return a layer for a tensor.

    Args:
        name: Its kind.
        x: What it gets first.
        n: Chooses among its variants.
    """
    return LAYERS[name](_square(floating(x)), n)


def is_linear(module: nn.Module) -> bool:
    """Tell whether a layer is a plain linear one, whose weight another one may share."""
    return isinstance(module, _Layer) and type(module.inner) is nn.Linear and "weight" in module.inner._parameters


def tie(one: nn.Module, other: nn.Module) -> None:
    """Have a linear layer use the weight of another one of its shape."""
    assert isinstance(one, _Layer) and isinstance(other, _Layer)
    if one.inner.weight.shape == other.inner.weight.shape:
        one.inner.weight = other.inner.weight


def loss_of(kind: int, out: Tensor, target: Tensor) -> Tensor:
    """Return a loss of outputs [samples, rows, features] and classes [samples, rows]."""
    if kind == 0:
        return F.cross_entropy(out.flatten(0, 1), target.flatten() % out.shape[-1])
    if kind == 1:
        return F.mse_loss(out, F.one_hot(target % out.shape[-1], out.shape[-1]).to(out.dtype))
    if kind == 2:
        return F.smooth_l1_loss(out.mean(-1), target.to(out.dtype))
    if kind == 3:
        return F.binary_cross_entropy_with_logits(out.amax(-1), (target % 2).to(out.dtype))
    if kind == 4:
        return F.kl_div(out.log_softmax(-1), torch.full_like(out, 1 / out.shape[-1]), reduction="batchmean")
    return out.float().pow(2).mean()

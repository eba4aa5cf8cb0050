"""Operators that random programs are made of: without parameters, on tensors whose first dimension is the sample.

Each takes its operands and a number that chooses among its variants, and returns a tensor or a tuple of them. Values
stay finite where those of the operands are moderate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.fuzzing.functions import FUNCTIONS

Tensor = torch.Tensor
Operator = Callable[..., Any]
_LARGE = 1 << 14  # elements, of which no operator makes more


def dimension(x: Tensor, n: int) -> int:
    """Return one of a tensor's dimensions behind the first."""
    return 1 + n % (x.dim() - 1)


def fitted(y: Tensor, x: Tensor) -> Tensor:
    """Return a tensor that broadcasts to another one: the first itself, or its mean over all but the samples."""
    try:
        if torch.broadcast_shapes(y.shape, x.shape) == x.shape:
            return y
    except RuntimeError:
        pass
    return y.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))


def floating(x: Tensor) -> Tensor:
    """Return a tensor of numbers that have gradients."""
    return x if x.is_floating_point() else x.float()


def _square(x: Tensor) -> Tensor:
    """Return a tensor of three dimensions."""
    return x.flatten(1, -2) if x.dim() > 3 else x if x.dim() == 3 else x.unsqueeze(1)


def _half(x: Tensor, n: int) -> tuple[int, int]:
    d = dimension(x, n)
    return d, max(1, x.shape[d] // 2)


# Views.


def _transpose(x: Tensor, n: int) -> Tensor:
    return x.transpose(1, x.dim() - 1) if n % 2 else x.transpose(dimension(x, n), dimension(x, n + 1))


def _slice(x: Tensor, n: int) -> Tensor:
    d, half = _half(x, n)
    choices = [
        lambda: x.narrow(d, 0, half),
        lambda: x[:, ::2],
        lambda: x[..., 1:] if x.shape[-1] > 1 else x,
        lambda: x.select(d, 0).unsqueeze(d),
        lambda: x[..., None, :],
    ]
    return choices[n % 5]()


def _expand(x: Tensor, n: int) -> Tensor:
    return x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1)) if n % 2 else x.mean(1, keepdim=True).expand_as(x)


def _unfold(x: Tensor, n: int) -> Tensor:
    d = dimension(x, n)
    return x.unfold(d, min(2, x.shape[d]), 1 + n % 2)


def _reshape(x: Tensor, n: int) -> Tensor:
    return [x.flatten(1).unsqueeze(1), x.reshape(x.shape[0], -1, x.shape[-1]), x.unsqueeze(-1).squeeze(-1)][n % 3]


def _diagonal(x: Tensor, n: int) -> Tensor:
    return _square(x).diagonal(dim1=1, dim2=2)


def _permuted(x: Tensor, n: int) -> Tensor:
    return x.permute(0, *reversed(range(1, x.dim())))


VIEWS: dict[str, Operator] = {
    "transpose": _transpose,
    "slice": _slice,
    "expand": _expand,
    "unfold": _unfold,
    "reshape": _reshape,
    "diagonal": _diagonal,
    "permute": _permuted,
    "chunk": lambda x, n: x.chunk(2 + n % 2, dimension(x, n)),
    "split": lambda x, n: x.split(_half(x, n)[1], dimension(x, n)),
    "unbind": lambda x, n: tuple(t.unsqueeze(1) for t in x.unbind(1)[:3]) if x.dim() > 2 else x.unbind(1)[0][:, None],
    "tensor_split": lambda x, n: x.tensor_split(2, dimension(x, n)),
    "detach": lambda x, n: x.detach(),
    "view_as_real": lambda x, n: torch.view_as_real(torch.complex(x.float(), x.float())).flatten(-2),
    "contiguous": lambda x, n: x.contiguous(),
}


# In place, on what was just made or on what others see too.


def _in_place(change: Operator) -> Operator:
    """Return an operator that changes a copy, a product or its operand itself."""

    def run(x: Tensor, *others: Any) -> Tensor:
        n = others[-1]
        own: Tensor = [lambda: x.clone(), lambda: x * 0.5, lambda: x][n % 3]()
        change(own, *others)
        return own

    return run


def _set_slice(x: Tensor, y: Tensor, n: int) -> None:
    if n % 2:
        x[:, 0] = fitted(y, x)[:, 0].to(x.dtype) if fitted(y, x).shape[1:] == x.shape[1:] else 0.5
    else:
        x[..., :1] = x[..., :1] * 0.5


def _fill(x: Tensor, y: Tensor, n: int) -> Tensor:
    filled = torch.zeros_like(x) if n % 2 else x.new_zeros(x.shape)
    filled[:, : _half(x, 0)[1]] = 0.5 * x[:, : _half(x, 0)[1]]
    return filled.add_(fitted(y, x))


def _on_view(x: Tensor, n: int) -> Tensor:
    view: Tensor = [lambda: x[:, :1], lambda: x.transpose(1, -1), lambda: x.flatten(1), lambda: x[..., ::2]][
        n // 3 % 4
    ]()
    return [view.mul_, view.add_][n % 2](0.5)


IN_PLACE: dict[str, Operator] = {
    "relu_": _in_place(lambda x, n: x.relu_()),
    "tanh_": _in_place(lambda x, n: x.tanh_()),
    "sigmoid_": _in_place(lambda x, n: x.sigmoid_()),
    "leaky_relu_": _in_place(lambda x, n: F.leaky_relu_(x, 0.1)),
    "clamp_": _in_place(lambda x, n: x.clamp_(-1, 1)),
    "mul_": _in_place(lambda x, n: x.mul_(0.5)),
    "on_view_": _in_place(_on_view),
    "masked_fill_": _in_place(lambda x, n: x.masked_fill_(x.detach() > 1, 0.5)),
    "dropout_": _in_place(lambda x, n: F.dropout(x, 0.2, True, inplace=True)),
    "zero_slice_": _in_place(lambda x, n: x[:, :1].zero_()),
    "hardtanh_": _in_place(lambda x, n: F.hardtanh_(x)),
}
IN_PLACE_OF_TWO: dict[str, Operator] = {
    "add_": _in_place(lambda x, y, n: x.add_(fitted(y, x))),
    "mul_by_": _in_place(lambda x, y, n: x.mul_(fitted(y, x).to(x.dtype).tanh())),
    "copy_": _in_place(lambda x, y, n: x.copy_(fitted(y, x))),
    "lerp_": _in_place(lambda x, y, n: x.lerp_(fitted(y, x).to(x.dtype).expand_as(x), 0.3)),
    # Of what it changes it must save copies: autograd holds what it saves with what saved it, for ever.
    "addcmul_": _in_place(lambda x, y, n: x.addcmul_(*2 * [fitted(y, x).to(x.dtype).tanh()], value=0.1)),
    "set_slice_": _in_place(_set_slice),
    "index_add_": _in_place(
        lambda x, y, n: x.index_add_(1, torch.zeros(1, dtype=torch.long), x.detach()[:, :1].clone(), alpha=0.1)
    ),
    "filled": _fill,
}


# Those that save what they return, or other things than their operands.


def _cdist(x: Tensor, n: int) -> Tensor:
    y = _square(x).float()
    return torch.cdist(y, y.detach() if n % 2 else y, p=[2.0, 1.0][n // 2 % 2])


def _pooled(x: Tensor, n: int) -> Tensor:
    y = _square(x)
    if min(y.shape[1:]) < 2:
        return y
    pools: list[Callable[[], Tensor]] = [
        lambda: F.max_pool1d(y, 2),
        lambda: F.avg_pool1d(y, 2, 1),
        lambda: F.max_pool2d(y.unsqueeze(1), 2).squeeze(1),
        lambda: F.adaptive_avg_pool1d(y, 3),
        lambda: F.adaptive_max_pool1d(y, 2),
        lambda: F.avg_pool2d(y.unsqueeze(1), 2, 1).squeeze(1),
        lambda: F.max_pool1d(y, 2, return_indices=True)[0],
        lambda: F.lp_pool1d(y.abs() + 0.1, 2, 2),
    ]
    return pools[n % 8]()


def _padded(x: Tensor, n: int) -> Tensor:
    y = _square(x)
    mode = ["constant", "replicate", "reflect", "circular"][n % 4]
    return F.pad(y, (1, 1), mode) if y.shape[-1] > 1 else y


def _resized(x: Tensor, n: int) -> Tensor:
    y = _square(x).float()
    if n % 3 == 2:
        return F.interpolate(y.unsqueeze(1), scale_factor=1.5, mode="bilinear", align_corners=False).squeeze(1)
    return F.interpolate(y, scale_factor=2.0 if y.numel() < _LARGE else 0.5, mode=["nearest", "linear"][n % 3])


def _normalised(x: Tensor, n: int) -> Tensor:
    y = _square(x)
    norms: list[Callable[[], Tensor]] = [
        lambda: F.layer_norm(y, y.shape[-1:]),
        lambda: F.rms_norm(y, y.shape[-1:]),
        lambda: F.group_norm(y, 1),
        lambda: F.instance_norm(y) if y.shape[-1] > 1 else y,
        lambda: F.normalize(y, dim=-1),
        lambda: F.batch_norm(y, None, None, training=True),
    ]
    return norms[n % 6]()


def _attention(x: Tensor, n: int) -> Tensor:
    y = _square(x).unsqueeze(1)
    dropout, causal = (0.1 if n % 4 == 3 else 0.0), n % 2 == 1
    return F.scaled_dot_product_attention(y, y, 0.5 * y, dropout_p=dropout, is_causal=causal).squeeze(1)


def _spectrum(x: Tensor, n: int) -> Any:
    spectrum = torch.fft.rfft(x.float(), dim=-1, norm="ortho")
    if n % 3 == 2:
        return torch.fft.irfft(spectrum, n=x.shape[-1])
    return spectrum.real if n % 3 else spectrum.abs()


def _whole(x: Tensor, n: int) -> Tensor:
    ways: list[Callable[[], Tensor]] = [
        lambda: x.max(),
        lambda: x.min(),
        lambda: x.median(),
        lambda: x.nanmedian(),
        lambda: x.std(),
        lambda: x.norm(),
        lambda: x.logsumexp(tuple(range(x.dim()))),
    ]
    return x - 0.5 * ways[n % 7]()


def _unfolded(x: Tensor, n: int) -> Tensor:
    y = _square(x).float().unsqueeze(1)
    if min(y.shape[2:]) < 2 or y.numel() > _LARGE:
        return x
    patches = F.unfold(y, 2, stride=1 + n % 2, padding=1)
    return F.fold(patches, y.shape[2:], 2, stride=1 + n % 2, padding=1) if n % 3 else patches


def _decomposed(x: Tensor, n: int) -> Tensor:
    y = _square(x).float()
    y = y if y.shape[1] <= y.shape[2] else y.mT
    symmetric = y @ y.mT / y.shape[-1] + 2 * torch.eye(y.shape[1])
    ways: list[Callable[[], Tensor]] = [
        lambda: torch.linalg.cholesky(symmetric),
        lambda: torch.linalg.solve_triangular(symmetric.tril(), y, upper=False),
        lambda: torch.linalg.solve(symmetric, y),
        lambda: torch.linalg.inv(symmetric),
        lambda: torch.linalg.qr(symmetric)[n // 9],
        lambda: torch.linalg.eigvalsh(symmetric),
        lambda: torch.cholesky_inverse(torch.linalg.cholesky(symmetric)),
        lambda: torch.linalg.slogdet(symmetric)[1],
        lambda: torch.linalg.matrix_power(0.1 * symmetric, 3),
    ]
    return ways[n % 9]()


def _imaged(x: Tensor, n: int) -> Tensor:
    """Take rows as channels and features as pixels, the channels last in memory."""
    y = _square(x).float().unsqueeze(2).contiguous(memory_format=torch.channels_last)
    weight = torch.eye(y.shape[1])[:, :, None, None]
    ways: list[Callable[[], Tensor]] = [
        lambda: F.conv2d(y, weight).relu(),
        lambda: F.batch_norm(F.conv2d(y, weight), None, None, training=True),
        lambda: F.hardswish(F.conv2d(y, weight)),
        lambda: F.elu(y) + F.relu6(y),
        lambda: F.pad(y, (1, 1, 0, 0), mode="replicate") if y.shape[3] > 1 else y,
        lambda: F.interpolate(y, scale_factor=(1, 2), mode="bilinear") if y.numel() < _LARGE else y,
        lambda: F.adaptive_avg_pool2d(y, (1, 2)),
        lambda: F.max_pool2d(y, (1, 2)) if y.shape[3] > 1 else y,
        lambda: F.group_norm(y, 1),
        lambda: F.pixel_unshuffle(y.expand(-1, -1, 2, -1), 2) if y.shape[3] % 2 == 0 else y,
        lambda: F.softmax(y, 1).roll(1, 3),
    ]
    return ways[n % 11]().flatten(2)


def _scored(x: Tensor, n: int) -> Tensor:
    """Return a loss for each element, or of all of them added to each."""
    goal, reduction = x.detach().sigmoid(), "mean" if n % 2 else "none"
    ways: list[Callable[[], Tensor]] = [
        lambda: F.binary_cross_entropy_with_logits(x, goal, pos_weight=1 + goal[:1], reduction=reduction),
        lambda: F.binary_cross_entropy(x.sigmoid(), goal, reduction=reduction),
        lambda: F.soft_margin_loss(x, goal.sub(0.5).sign(), reduction=reduction),
        lambda: F.huber_loss(x, goal, delta=0.5, reduction=reduction),
        lambda: F.l1_loss(x, goal, reduction=reduction),
        lambda: F.poisson_nll_loss(x, goal, reduction=reduction),
        lambda: F.gaussian_nll_loss(x, goal, goal + 0.1, reduction=reduction),
        lambda: F.hinge_embedding_loss(x, goal.sub(0.5).sign(), reduction=reduction),
        lambda: F.multi_margin_loss(x.flatten(1), goal.flatten(1).argmax(1), reduction=reduction),
        lambda: F.cross_entropy(x, goal.argmax(1), label_smoothing=0.1, reduction=reduction),
        lambda: F.cosine_embedding_loss(x.flatten(1), goal.flatten(1), torch.ones(len(x)), reduction=reduction),
    ]
    found = ways[n // 2 % 11]()
    return x * found.mean() if found.shape != x.shape else found


SAVING: dict[str, Operator] = {
    "whole": _whole,
    "unfold": _unfolded,
    "decompose": _decomposed,
    "image": _imaged,
    "score": _scored,
    "exp": lambda x, n: x.clamp(max=1).exp(),
    "softmax": lambda x, n: [F.softmax, F.log_softmax, F.softmin][n % 3](x, dim=-1),
    "sigmoid": lambda x, n: x.sigmoid(),
    "tanh": lambda x, n: x.tanh(),
    "relu": lambda x, n: [F.relu, F.elu, F.selu, F.leaky_relu, F.relu6, F.celu][n % 6](x),
    "gelu": lambda x, n: [F.gelu, F.silu, F.mish, F.hardswish, F.softplus, F.softsign, F.tanhshrink, F.logsigmoid][
        n % 8
    ](x),
    "sqrt": lambda x, n: [torch.sqrt, torch.rsqrt][n % 2](x.abs() + 0.5),
    "reciprocal": lambda x, n: (x.abs() + 1).reciprocal(),
    "pow": lambda x, n: [x.pow, (x.abs() + 0.5).pow][n % 2]([2, 0.5][n % 2]),
    "trigonometric": lambda x, n: [torch.sin, torch.cos, torch.atan, torch.erf, torch.asinh][n % 5](x),
    "norm": lambda x, n: x.norm(p=[2, 1, 3][n % 3], dim=dimension(x, n), keepdim=True),
    "cumprod": lambda x, n: x.tanh().cumprod(dimension(x, n)),
    "cumsum": lambda x, n: [torch.cumsum, torch.logcumsumexp][n % 2](0.1 * x, dimension(x, n)),
    "cdist": _cdist,
    "logsumexp": lambda x, n: x.logsumexp(dimension(x, n), keepdim=True),
    "prod": lambda x, n: x.tanh().prod(dimension(x, n), keepdim=True),
    "amax": lambda x, n: (
        [x.amax, x.amin, x.mean, x.sum, x.std][n % 5](dim=dimension(x, n // 5), keepdim=True) * (1 if n % 5 != 4 else 0)
    ),
    "glu": lambda x, n: F.glu(x, -1) if x.shape[-1] % 2 == 0 else x,
    "pool": _pooled,
    "pad": _padded,
    "interpolate": _resized,
    "normalise": _normalised,
    "attention": _attention,
    "spectrum": _spectrum,
    "triangle": lambda x, n: _square(x).tril() if n % 2 else _square(x).triu(),
    "roll": lambda x, n: [x.roll(1, 1), x.flip(1), x.repeat_interleave(2, 1), x.repeat(1, 2, *[1] * (x.dim() - 2))][
        n % 4
    ],
    "cast": lambda x, n: [x.bfloat16, x.double, x.float, x.half][n % 4](),
    "gram": lambda x, n: torch.einsum("btd,bsd->bts", _square(x), _square(x)) / _square(x).shape[-1],
    "cosine": lambda x, n: F.cosine_similarity(x, 0.5 * x + 1, dim=-1).unsqueeze(-1),
    "gather": lambda x, n: x.gather(-1, x.detach().argsort(-1)),
    "index_select": lambda x, n: x.index_select(1, torch.arange(0, x.shape[1], 2)),
    "index": lambda x, n: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "take": lambda x, n: x.take_along_dim(x.argmax(-1, keepdim=True), -1),
    "renorm": lambda x, n: x.renorm(2, 0, 1.0),
    "nan_to_num": lambda x, n: x.nan_to_num(),
}


# Several outputs.


def _sorted(x: Tensor, n: int) -> tuple[Tensor, ...]:
    values, indices = x.sort(dim=dimension(x, n), descending=bool(n % 2))
    return (values, indices) if n % 3 else (values,)


def _extremes(x: Tensor, n: int) -> tuple[Tensor, ...]:
    found: Any = [x.max, x.min, x.median, lambda d, keepdim: x.kthvalue(1, d, keepdim=keepdim)][n % 4]
    return tuple(found(dimension(x, n // 4), keepdim=True))


def _moments(x: Tensor, n: int) -> tuple[Tensor, ...]:
    d = dimension(x, n)
    variance, mean = torch.var_mean(x, d, keepdim=True, correction=0)
    return (
        (variance, mean)
        if n % 2
        else (torch.std_mean(x + 0.1 * torch.arange(x.shape[d])[-1], d, correction=0)[1].unsqueeze(d),)
    )


SEVERAL: dict[str, Operator] = {
    "topk": lambda x, n: tuple(x.topk(max(1, x.shape[-1] // 2), -1)),
    "sort": _sorted,
    "extremes": _extremes,
    "cummax": lambda x, n: tuple(x.cummax(dimension(x, n))),
    "var_mean": _moments,
    "aminmax": lambda x, n: tuple(x.aminmax(dim=-1, keepdim=True)),
    "frexp": lambda x, n: torch.frexp(x)[0] if x.dtype is torch.float32 else x,
    "meshed": lambda x, n: torch.broadcast_tensors(x, x.mean(1, keepdim=True)),
}


# What has no gradient, and draws.


def _drawn(x: Tensor, n: int) -> Tensor:
    draws: list[Callable[[], Tensor]] = [
        lambda: F.dropout(x, 0.1, True),
        lambda: x + 0.1 * torch.randn_like(x),
        lambda: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda: F.rrelu(x, training=True),
        lambda: F.alpha_dropout(x, 0.1, True),
        lambda: F.gumbel_softmax(x, hard=bool(n % 2), dim=-1),
        lambda: F.dropout1d(_square(x), 0.1, True),
        lambda: x * torch.rand(x.shape[0], *[1] * (x.dim() - 1)),
        lambda: x.index_select(1, torch.randperm(x.shape[1])),
    ]
    return draws[n % 9]()


NOT_DIFFERENTIABLE: dict[str, Operator] = {
    "argmax": lambda x, n: x.argmax(-1, keepdim=True),
    "one_hot": lambda x, n: F.one_hot(x.detach().argmax(-1), x.shape[-1]),
    "compare": lambda x, n: [x > 0, x.ge(0.5), x == x, x.isfinite()][n % 4],
    "round": lambda x, n: [x.round, x.sign, x.floor, x.ceil][n % 4](),
    "straight_through": lambda x, n: x + (x.round() - x).detach(),
    "argsort": lambda x, n: x.argsort(-1),
    "draw": _drawn,
    "bucketize": lambda x, n: torch.bucketize(x.detach(), torch.linspace(-1, 1, 4, dtype=x.dtype)),
}


# Of two operands.


def _where(x: Tensor, y: Tensor, n: int) -> Tensor:
    other = fitted(y, x)
    return torch.where(x > 0 if n % 2 else other > 0, x, other)


def _joined(x: Tensor, y: Tensor, n: int) -> Tensor:
    if x.shape == y.shape:
        return torch.stack([x, y], 1) if n % 2 else torch.cat([x, y], dimension(x, n))
    return torch.cat([x.flatten(1), y.flatten(1)], 1).unsqueeze(1)


def _product(x: Tensor, y: Tensor, n: int) -> Tensor:
    left, right = _square(x), _square(y).to(x.dtype)
    scale = 1 / left.shape[-1]
    if left.shape[-1] == right.shape[1]:
        return torch.bmm(left, right) * scale
    if left.shape[-1] == right.shape[-1]:
        return torch.baddbmm(left.mean(), left, right.transpose(1, 2), alpha=scale)
    return left @ left.transpose(1, 2) * scale


def _scattered(x: Tensor, y: Tensor, n: int) -> Tensor:
    indices = y.detach().argsort(-1) if y.shape == x.shape else x.detach().argsort(-1)
    return x.scatter_add(-1, indices, x) if n % 2 else torch.zeros_like(x).scatter(-1, indices, 0.5 * x)


def _clamped(x: Tensor, y: Tensor, n: int) -> Tensor:
    low = fitted(y, x).to(x.dtype) - 1
    ways: list[Callable[[], Tensor]] = [
        lambda: x.clamp(low.detach(), None),
        lambda: torch.maximum(x, fitted(y, x)),
        lambda: x.clamp(low, low + 1),
        lambda: torch.minimum(x, fitted(y, x)),
    ]
    return ways[n % 4]()


OF_TWO: dict[str, Operator] = {
    "add": lambda x, y, n: x + fitted(y, x),
    "sub": lambda x, y, n: x.sub(fitted(y, x), alpha=0.5),
    "mul": lambda x, y, n: x * fitted(y, x).tanh(),
    "div": lambda x, y, n: x / (fitted(y, x).abs() + 1),
    "where": _where,
    "join": _joined,
    "product": _product,
    "scatter": _scattered,
    "clamp": _clamped,
    "lerp": lambda x, y, n: torch.lerp(x, fitted(y, x).to(x.dtype).expand_as(x), 0.3),
    "addcdiv": lambda x, y, n: torch.addcdiv(x, x, fitted(y, x).to(x.dtype).abs() + 1, value=0.5),
    "distance": lambda x, y, n: (x - fitted(y, x)).pow(2).sum(-1, keepdim=True),
    "huber": lambda x, y, n: F.smooth_l1_loss(x, fitted(y, x).to(x.dtype).expand_as(x), reduction="none"),
    "masked_fill": lambda x, y, n: x.masked_fill(fitted(y, x) > 0.5, 0.5),
    "atan2": lambda x, y, n: torch.atan2(x, fitted(y, x).abs() + 0.5),
    "hypot": lambda x, y, n: torch.hypot(x.float(), fitted(y, x).float().abs() + 0.5),
    "index_put": lambda x, y, n: x.index_put(
        (torch.arange(x.shape[0]),), fitted(y, x).to(x.dtype).expand_as(x), bool(n % 2)
    ),
    "kept_max": lambda x, y, n: torch.stack([x, fitted(y, x).to(x.dtype).expand_as(x)]).max(0)[0],
}


# Hooks of tensors.


def _hooked(x: Tensor, n: int) -> Tensor:
    y = x * 1.0 if n % 2 else x
    if y.requires_grad:
        hooks = [lambda g: g * 0.5, lambda g: None, lambda g: g.clamp(-1, 1), lambda g: g.clone()]
        y.register_hook(hooks[n // 2 % 4])
    return y


def _retained(x: Tensor, n: int) -> Tensor:
    y = x * 0.5
    if y.requires_grad:
        y.retain_grad()
    return y


HOOKS: dict[str, Operator] = {"hook": _hooked, "retain_grad": _retained}

OF_ONE = {**VIEWS, **IN_PLACE, **SAVING, **SEVERAL, **NOT_DIFFERENTIABLE, **HOOKS, **FUNCTIONS}
OF_SEVERAL = {**IN_PLACE_OF_TWO, **OF_TWO}


@functools.cache
def arity(name: str) -> int:
    """Return how many operands an operator takes."""
    return 2 if name in OF_SEVERAL else 1

"""Layers for Jittor that need less memory: the first two are the same mathematics, the last is another model.

- `lean(model)` recomputes normalisations, of two or three dimensions, with what follows them up to the next layer
  with weights, so that one tensor of each such group is kept instead of two. In-place activated BatchNorm (S. Rota
  Bulò et al., 2018, *In-Place Activated BatchNorm for Memory-Optimized Training of DNNs*) gets there by inverting the
  activation; recomputing works for any. A normalisation alone would save nothing: Jittor fuses it with what follows.
- `attention` computes softmax(q kᵀ) v by blocks of queries that are recomputed, so that no N×N matrix is kept or made
  (M. N. Rabe and C. Staats, 2021, *Self-attention Does Not Need O(n²) Memory*; ours cuts queries only).
- `depthwise_separable` puts a depthwise and a pointwise convolution in the place of each dense one (F. Chollet, 2017,
  *Xception*).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jittor as jt

from memfit.errors import UsageError
from memfit.ir.remat import Region
from memfit.jittor.checkpoint import checkpoint
from memfit.jittor.regions import checkpointed, is_chain
from memfit.jittor.variables import modules_of

_NORMALISATIONS = (jt.nn.BatchNorm, jt.nn.LayerNorm, jt.nn.GroupNorm, jt.nn.InstanceNorm)


@contextlib.contextmanager
def lean(model: Any) -> Iterator[None]:
    """Recompute a model's normalisations in the backward pass, for calls and gradients inside this context.

    Args:
        model: The model. Its modules are as they were afterwards.
    """
    with checkpointed(model, lean_regions(model)):
        yield


def lean_regions(model: Any) -> tuple[Region, ...]:
    """Return the groups that `lean` recomputes, for `Step(regions=)`.

    They are found where an `nn.Sequential` calls a normalisation, layers without weights, and one with weights in turn.
    """
    found = []
    for fqn, module in modules_of(model).items():
        if is_chain(module):
            found += [Region(tuple(f"{fqn}.{n}" if fqn else n for n in names)) for names in _groups(module.layers)]
    return tuple(found)


def _groups(layers: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the names of a normalisation, what follows it, and the next layer with weights."""
    group: list[str] = []
    for name, layer in layers.items():
        is_norm = isinstance(layer, _NORMALISATIONS)
        if is_norm:
            group = [name]
        elif group:
            group.append(name)
            if layer.parameters():
                yield group
                group = []


def attention(q: Any, k: Any, v: Any, *, block: int = 128, causal: bool = False, scale: float | None = None) -> Any:
    """Return softmax(scale · q kᵀ) v without an N×N matrix.

    Args:
        q: (..., N, D).
        k: (..., M, D).
        v: (..., M, E).
        block: Queries at a time (> 0): what is made at once is (..., block, M).
        causal: Whether query i sees keys up to i only; N = M then.
        scale: None for D to the power of −1/2.

    Raises:
        UsageError: `block` is not positive, or `causal` with N ≠ M.
    """
    length, keys, width = int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1])
    if block < 1:
        raise UsageError(f"block={block} is not above 0: give a number of queries")
    if causal and length != keys:
        raise UsageError(f"causal=True needs as many queries as keys, not {length} and {keys}")
    batch = list(q.shape[:-2])
    q, k, v = (one.reshape((-1, *one.shape[-2:])) for one in (q, k, v))
    factor = width**-0.5 if scale is None else scale
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        seen = stop if causal else keys
        parts.append(checkpoint(_attend, q[:, start:stop], k[:, :seen], v[:, :seen], start if causal else None, factor))
    return jt.concat(parts, dim=1).reshape([*batch, length, int(v.shape[-1])])


def _attend(q: Any, k: Any, v: Any, start: int | None, factor: float) -> Any:
    """Return attention of some queries; those of a causal one begin at `start`."""
    scores = jt.nn.bmm_transpose(q, k) * factor
    if start is not None:
        shape = (int(scores.shape[1]), int(scores.shape[2]))
        hidden = jt.index(shape, 1) > jt.index(shape, 0) + start
        scores = scores - 1e30 * hidden.float32().unsqueeze(0)
    return jt.nn.bmm(jt.nn.softmax(scores, dim=-1), v)


def depthwise_separable(inputs: int, outputs: int, kernel_size: int = 3, *, stride: int = 1, dims: int = 2) -> Any:
    """Return a depthwise convolution and a pointwise one, in place of a dense convolution.

    Args:
        inputs: Channels (> 0).
        outputs: Channels (> 0).
        kernel_size: Of the depthwise one, odd; the size stays at stride 1.
        stride: Of the depthwise one.
        dims: 2 or 3.

    Raises:
        UsageError: `dims` is neither 2 nor 3, or `kernel_size` is even.
    """
    if dims not in (2, 3) or kernel_size % 2 == 0:
        raise UsageError(f"dims={dims}, kernel_size={kernel_size}: give 2 or 3 dimensions and an odd kernel")
    conv = jt.nn.Conv if dims == 2 else jt.nn.Conv3d
    padding = kernel_size // 2
    deep = conv(inputs, inputs, kernel_size, stride=stride, padding=padding, groups=inputs, bias=False)
    return jt.nn.Sequential(deep, conv(inputs, outputs, 1))

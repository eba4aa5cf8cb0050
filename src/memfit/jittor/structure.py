"""Layers for Jittor that need less memory: the first two compute the same, the last is another model.

- `lean(model)` recomputes normalisations, of two or three dimensions, with the layers up to the next one with weights,
  so that one tensor of each such group is kept instead of two. In-place activated BatchNorm (S. Rota Bulò et al., 2018,
  *In-Place Activated BatchNorm for Memory-Optimized Training of DNNs*) inverts the activation for the same effect;
  recomputing works for any. A normalisation alone would save nothing: Jittor fuses it with the next operators.
- `attention` computes softmax(q kᵀ) v by recomputed blocks of queries, without an N×N matrix
  (M. N. Rabe and C. Staats, 2021, *Self-attention Does Not Need O(n²) Memory*; ours cuts queries only).
- `depthwise_separable` replaces a dense convolution by a depthwise and a pointwise one (F. Chollet, 2017,
  *Xception*).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memfit.errors import UsageError
from memfit.ir import Region
from memfit.jittor.checkpointing import checkpoint, checkpointed
from memfit.jittor.internals import jt
from memfit.jittor.step import NORMALISATIONS
from memfit.jittor.variables import is_chain, layers_of, modules_of


@contextlib.contextmanager
def lean(model: Any) -> Iterator[None]:
    """Recompute a model's normalisations in the backward pass, for calls and gradients inside this context."""
    with checkpointed(model, lean_regions(model)):
        yield


def lean_regions(model: Any) -> tuple[Region, ...]:
    """Return the groups that `lean` recomputes, for `Step(regions=)`.

    A group is a normalisation, layers without weights, and a layer with weights that an `nn.Sequential` calls in turn.
    """
    regions = []
    for fqn, module in modules_of(model).items():
        group: list[str] = []
        for name, layer in zip(layers_of(fqn, module), module.layers.values(), strict=True) if is_chain(module) else ():
            if isinstance(layer, NORMALISATIONS):
                group = [name]
            elif group:
                group.append(name)
                if layer.parameters():
                    regions.append(Region(tuple(group)))
                    group = []
    return tuple(regions)


def attention(q: Any, k: Any, v: Any, *, block: int = 128, causal: bool = False, scale: float | None = None) -> Any:
    """Return softmax(scale · q kᵀ) v without an N×N matrix.

    Args:
        q: (..., N, D).
        k: (..., M, D).
        v: (..., M, E).
        block: Queries at a time (> 0): scores have the shape (..., block, M).
        causal: Whether query i attends to keys up to i only; needs N = M.
        scale: Factor of the scores; None for D to the power of −1/2.

    Raises:
        UsageError: `block` is not positive, or `causal` with N ≠ M.
    """
    length, keys, width = int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1])
    if block < 1:
        raise UsageError(f"block={block} is not above 0: give a number of queries")
    if causal and length != keys:
        raise UsageError(f"causal=True needs as many queries as keys: q has {length}, and k has {keys}")
    batch = list(q.shape[:-2])
    q, k, v = (t.reshape((-1, *t.shape[-2:])) for t in (q, k, v))
    factor = width**-0.5 if scale is None else scale

    def attend(q: Any, k: Any, v: Any, start: int | None) -> Any:
        """Return attention of a block of queries, which begins at `start` where it is causal."""
        scores = jt.nn.bmm_transpose(q, k) * factor
        if start is not None:
            shape = (int(scores.shape[1]), int(scores.shape[2]))
            hidden = jt.index(shape, 1) > jt.index(shape, 0) + start
            scores = scores - 1e30 * hidden.float32().unsqueeze(0)
        return jt.nn.bmm(jt.nn.softmax(scores, dim=-1), v)

    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        seen = stop if causal else keys
        parts.append(checkpoint(attend, q[:, start:stop], k[:, :seen], v[:, :seen], start if causal else None))
    return jt.concat(parts, dim=1).reshape([*batch, length, int(v.shape[-1])])


def depthwise_separable(inputs: int, outputs: int, kernel_size: int = 3, *, stride: int = 1, dims: int = 2) -> Any:
    """Return a depthwise and a pointwise convolution to replace a dense one.

    Args:
        inputs: Input channels (> 0).
        outputs: Output channels (> 0).
        kernel_size: Kernel size of the depthwise convolution, odd; it keeps the spatial size at stride 1.
        stride: Stride of the depthwise convolution.
        dims: Spatial dimensions, 2 or 3.

    Raises:
        UsageError: `dims` is neither 2 nor 3, or `kernel_size` is even.
    """
    if dims not in (2, 3) or kernel_size % 2 == 0:
        raise UsageError(f"dims={dims}, kernel_size={kernel_size}: give 2 or 3 dimensions and an odd kernel")
    conv = jt.nn.Conv if dims == 2 else jt.nn.Conv3d
    padding = kernel_size // 2
    deep = conv(inputs, inputs, kernel_size, stride=stride, padding=padding, groups=inputs, bias=False)
    return jt.nn.Sequential(deep, conv(inputs, outputs, 1))

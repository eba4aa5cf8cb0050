from __future__ import annotations

from typing import Any

import jittor as jt
import numpy as np
import pytest

from memfit import jittor as mj
from memfit.errors import UsageError
from memfit.jittor import seed
from memfit.jittor.variables import is_trainable, named_variables
from tests.jittor.models import residuals

nn = jt.nn


def dense_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """By NumPy, in fp64."""
    scores = np.einsum("bnd,bmd->bnm", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = np.where(np.triu(np.ones(scores.shape[1:]), 1) > 0, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnm,bme->bne", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("block", "causal"), [(1, True), (5, True), (64, True), (5, False)])
def test_attention_by_blocks_is_attention(block: int, causal: bool) -> None:
    random = np.random.RandomState(0)
    q, k, v = (random.randn(6, 12, 4) for _ in range(3))
    given = [jt.array(one.reshape(2, 3, 12, 4).astype("float32")) for one in (q, k, v)]
    found = mj.structure.attention(*given, block=block, causal=causal)
    np.testing.assert_allclose(found.numpy().reshape(6, 12, 4), dense_attention(q, k, v, causal), atol=2e-6)
    assert found.shape == [2, 3, 12, 4]


def test_gradients_of_attention_by_blocks_are_those_in_one_block() -> None:
    seed(0)
    given = [jt.randn(2, 12, 4) for _ in range(3)]
    jt.sync(given)
    results = []
    for block in (4, 12):
        y = mj.structure.attention(*given, block=block, causal=True)
        results.append([g.numpy() for g in jt.grad(y.sqr().sum(), given)])
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_attention_by_blocks_makes_no_square_matrix() -> None:
    seed(0)
    given = [jt.randn(1, 2048, 16) for _ in range(3)]
    peaks = []
    for block in (2048, 128):
        for _ in range(2):
            with mj.memory.measure() as measured:
                jt.sync(jt.grad(mj.structure.attention(*given, block=block).sqr().sum(), given, retain_graph=False))
        peaks.append(measured.added_bytes)
    print(f"{peaks[0] / 2**20:.1f} MiB in one block, {peaks[1] / 2**20:.1f} MiB by blocks of 128")
    assert peaks[1] < 2048 * 2048 * 4 < peaks[0]


@pytest.mark.parametrize("dims", [2, 3])
def test_lean_normalisations_change_nothing_and_keep_less(dims: int) -> None:
    conv, size = (nn.Conv, (48, 48)) if dims == 2 else (nn.Conv3d, (16, 16, 16))
    results, peaks = [], []
    for is_lean in (False, True):
        for _ in range(2):  # the first compiles
            seed(0)
            model = nn.Sequential(*(layer for _ in range(8) for layer in (conv(8, 8, 1), nn.BatchNorm(8), nn.ReLU())))
            x = jt.randn(8, 8, *size)
            with mj.memory.measure() as measured, mj.structure.lean(model) if is_lean else jt.flag_scope(no_grad=0):
                parameters = [v for v in named_variables(model).values() if is_trainable(v)]
                made = jt.grad(model(x).sqr().mean(), parameters, retain_graph=False)
                jt.sync(made)
        peaks.append(measured.added_bytes)
        results.append([g.numpy() for g in made] + [v.numpy() for v in named_variables(model).values()])
    print(f"{dims}-D: {peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB lean")
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)
    assert peaks[1] < 0.8 * peaks[0]


def test_lean_regions_reach_from_a_normalisation_to_the_next_weights() -> None:
    norm, conv = nn.BatchNorm(4), nn.Conv(4, 4, 1)
    inner = nn.Sequential(nn.Conv(4, 4, 1), norm, nn.ReLU(), nn.Dropout(0.1), conv, nn.BatchNorm(4))
    model = nn.Sequential(inner, nn.GroupNorm(2, 4), nn.Conv(4, 4, 1), *residuals(1, 4).layers.values())
    assert [region.modules for region in mj.structure.lean_regions(model)] == [("1", "2"), ("0.1", "0.2", "0.3", "0.4")]


@pytest.mark.parametrize("dims", [2, 3])
def test_depthwise_separable_is_the_convolution_of_its_factors(dims: int) -> None:
    seed(0)
    pair = mj.structure.depthwise_separable(4, 6, dims=dims)
    x = jt.randn(2, 4, *[5] * dims)
    deep, point = pair[0].weight.numpy(), pair[1].weight.numpy().reshape(6, 4)
    assert deep.size + point.size < 4 * 6 * 3**dims
    conv = nn.Conv if dims == 2 else nn.Conv3d
    dense = conv(4, 6, 3, padding=1)
    dense.weight.assign(jt.array(np.einsum("oc,c...->oc...", point, deep[:, 0])))
    dense.bias.assign(pair[1].bias)
    np.testing.assert_allclose(pair(x).numpy(), dense(x).numpy(), rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_refused() -> None:
    x = jt.ones((1, 4, 2))
    with pytest.raises(UsageError, match="block=0"):
        mj.structure.attention(x, x, x, block=0)
    with pytest.raises(UsageError, match="causal=True"):
        mj.structure.attention(x, x[:, :2], x[:, :2], causal=True)
    with pytest.raises(UsageError, match="dims=1"):
        mj.structure.depthwise_separable(2, 2, dims=1)

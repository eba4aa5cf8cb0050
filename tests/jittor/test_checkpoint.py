from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jittor as jt
import numpy as np
import pytest

from benchmarks.frameworks.jittor_models import transformer
from benchmarks.frameworks.subject import TransformerSizes
from memfit import jittor as mj
from memfit.errors import PlanError, PlanMismatchError, RecomputationError
from memfit.ir import Region
from memfit.jittor import checkpoint, seed
from memfit.jittor.checkpointing import checkpointed, substituted
from memfit.jittor.variables import is_trainable, named_variables
from tests.jittor.models import mlp, residuals

STRICT = "-fno-fast-math -ffp-contract=off"
Results = dict[str, np.ndarray[Any, Any]]


def backward(model: Any, x: Any, regions: list[Region]) -> Results:
    """Return the loss, every gradient, and the buffers after it."""
    seed(1)
    parameters = {name: v for name, v in named_variables(model).items() if is_trainable(v)}
    with substituted(), checkpointed(model, regions):
        loss = model(x).sqr().mean()
        gradients = jt.grad(loss, [x, *parameters.values()], retain_graph=False)
        jt.sync([loss, *gradients])
    found = {"loss": loss, **dict(zip(["x", *parameters], gradients, strict=True))}
    buffers = {name: v for name, v in named_variables(model).items() if not is_trainable(v)}
    return {name: v.numpy() for name, v in (found | buffers).items()}


def runs(model: Any, length: int) -> list[Region]:
    names = list(model.layers)
    return [Region(tuple(names[start : start + length])) for start in range(0, len(names), length)]


def differences(left: Results, right: Results) -> dict[str, float]:
    """Return what differs, by the relative error in the Euclidean norm."""
    assert left.keys() == right.keys()
    unequal = {n: v for n, v in left.items() if not np.array_equal(v, right[n])}
    return {n: float(np.linalg.norm(v - right[n]) / np.linalg.norm(v)) for n, v in unequal.items()}


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "24-layer MLP": (lambda: mlp(24, 256), (4096, 256), 5),
    "8 convolutions with BatchNorm": (lambda: residuals(8, 16), (8, 16, 48, 48), 2),
    "6-block Transformer": (lambda: transformer(TransformerSizes(blocks=6, width=128, heads=4)), (8, 128, 128), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_peak_halves_and_every_number_stays(case: str) -> None:
    """Loss, gradients and statistics, to the bit."""
    make, shape, length = CASES[case]
    results, peaks = [], []
    for regions_of in (lambda model: [], lambda model: runs(model, length)):
        seed(0)
        model, x = make(), jt.randn(*shape)
        backward(model, x, regions_of(model))  # compiles
        seed(0)
        model, x = make(), jt.randn(*shape)
        with mj.memory.measure() as measured:
            results.append(backward(model, x, regions_of(model)))
        peaks.append(measured.added_bytes)
    print(f"{case}: {peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB, {peaks[1] / peaks[0]:.2f}")
    errors = differences(*results)
    assert errors == {}
    assert peaks[1] <= 0.5 * peaks[0]


def test_without_fast_mathematics_every_region_is_exact() -> None:
    """GELU and ends in front of a BatchNorm: the flags are those that docs/guides/jittor.md names."""

    def layers() -> Iterator[Any]:
        for _ in range(4):
            yield from (jt.nn.Conv(12, 12, 3, padding=1, bias=False), jt.nn.BatchNorm(12), jt.nn.GELU())

    def results(length: int) -> Results:
        seed(0)
        model = jt.nn.Sequential(*layers())
        return backward(model, jt.randn(3, 12, 19, 21), runs(model, length) if length else [])

    fast = differences(results(0), results(1))
    print(f"{len(fast)} differ in fast mathematics, at most by {max(fast.values(), default=0.0):.1e}")
    jt.sync_all(True)
    strict = {"cc_flags": f"{jt.flags.cc_flags} {STRICT}", "compile_options": {"strict": 1}}  # kernels of their own
    with jt.flag_scope(**strict):
        plain = results(0)
        assert [differences(plain, results(length)) for length in (1, 2, 3)] == [{}, {}, {}]


def test_the_comparison_sees_statistics_that_are_updated_twice() -> None:
    model, x = residuals(1), jt.ones((2, 8, 4, 4))
    once = backward(model, x, [])
    twice = backward(model, x, [])
    assert any("running_mean" in name for name in differences(once, twice))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_nested_regions_change_nothing(dropout: float) -> None:
    outer, inner = [Region(("0", "1")), Region(("2",))], [Region(("0.conv1",)), Region(("1.bn2",)), Region(("2.bn1",))]
    results = []
    for regions in ([], outer, outer + inner):
        seed(0)
        results.append(backward(residuals(3, 4, dropout), jt.randn(2, 4, 6, 6), regions))
    assert differences(results[0], results[1]) == {}
    assert differences(results[0], results[2]) == {}


def test_dropout_draws_the_same_mask_again() -> None:
    seed(3)
    layer, x = jt.nn.Dropout(0.5, is_train=True), jt.ones((64,))
    y = checkpoint(layer, x)
    assert np.array_equal(jt.grad(y.sum(), x).numpy(), y.numpy())
    assert 0.2 < (y.numpy() == 0).mean() < 0.8


def test_nested_arguments_and_results() -> None:
    def function(pair: Any, *, scale: Any, power: int) -> Any:
        left, right = pair["left"], pair["right"][0]
        return {"product": left * right * scale, "rest": (left**power, [right]), "mask": left > 0, "power": power}

    a, b, c = (jt.array(np.linspace(start, 2, 5).astype("float32")) for start in (-1, 0.5, 3))
    arguments: dict[str, Any] = {"scale": c, "power": 2}
    results = []
    for call in (function, lambda *args, **kwargs: checkpoint(function, *args, **kwargs)):
        made = call({"left": a, "right": [b]}, **arguments)
        assert made["power"] == 2 and made["mask"].numpy().tolist() == [False, False, True, True, True]
        total = made["product"].sum() + (made["rest"][0] * 3).sum() + made["rest"][1][0].sum()
        results.append({n: g.numpy() for n, g in zip("abc", jt.grad(total, [a, b, c]), strict=True)})
    assert differences(*results) == {}


def test_a_result_that_is_an_argument_keeps_both_gradients() -> None:
    x = jt.array([1.0, 2.0])
    same, twice = checkpoint(lambda v: (v, v * 2), x)
    assert jt.grad((same * 3 + twice).sum(), x).numpy().tolist() == [5.0, 5.0]


def test_frozen_parameters_and_arguments_without_gradients() -> None:
    layer = jt.nn.Linear(3, 3)
    layer.bias.stop_grad()
    x, index = jt.ones((2, 3)).stop_grad(), jt.array([1, 0])
    y = checkpoint(lambda v, i: layer(v)[i], x, index)
    (gradient,) = jt.grad(y.sum(), [layer.weight])
    assert gradient.numpy().tolist() == [[2.0] * 3] * 3
    with jt.no_grad():
        assert np.array_equal(checkpoint(layer, x).numpy(), layer(x).numpy())


HIDDEN = SimpleNamespace(weight=None)


@pytest.mark.parametrize(
    "function, how",
    [
        (lambda x: x * x.sum().item(), "reads values with item"),
        (lambda x: x * 2 if x.sum() > 0 else x, "reads values with __bool__"),
        (lambda x: x * jt.array(x.data.max()), "reads values with data"),
        (lambda x: x * float(np.random.rand()), "NumPy's generator"),
        (lambda x: x * random.random(), "Python's or"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(function: Any, how: str) -> None:
    with pytest.raises(RecomputationError, match=how):
        checkpoint(function, jt.ones((3,)))
    assert jt.ones((3,)).sum().item() == 3  # values can be read again


def test_variables_that_it_was_not_told_of_are_refused() -> None:
    HIDDEN.weight = jt.array([2.0, 3.0]).name("hidden")
    x = jt.ones((2,))
    with pytest.raises(RecomputationError, match=r"hidden of shape \(2,\)"):
        jt.grad(checkpoint(lambda v: v * HIDDEN.weight, x).sum(), [x, HIDDEN.weight])
    told = checkpoint(lambda v: v * HIDDEN.weight, x, parameters=[HIDDEN.weight])
    assert jt.grad(told.sum(), HIDDEN.weight).numpy().tolist() == [1.0, 1.0]
    holder = SimpleNamespace(hidden=x * 3)
    with pytest.raises(RecomputationError, match="not in parameters="):
        jt.grad(checkpoint(lambda v: v * holder.hidden, x).sum(), x)


def test_regions_that_are_no_run_are_refused() -> None:
    model = residuals(3, 4)
    for region in (Region(("0", "2")), Region(("0.conv1", "0.bn1")), Region(("nowhere",))):
        with pytest.raises(PlanMismatchError), checkpointed(model, [region]):
            pass
    with pytest.raises(PlanError, match="offload"), checkpointed(model, [Region(("0",), offload=True)]):
        pass
    assert "execute" not in vars(model.layers["0"])

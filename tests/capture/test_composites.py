"""Composite operators, and those with a backward pass of their own: under capture they run as in a step that nothing
watches, and give what they gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from memfit.capture import composites_lifted, composites_without_mode
from memfit.hardware import find_device
from memfit.ir import Levers
from memfit.planner import capture_levers, costs_of, predict
from memfit.workload import Workload
from tests.capture.steps import Function, assert_predicted, difference_bytes, squared
from tests.measuring import peaks

WIDTH = 64
NBYTES = 4 * 64 * 64 * WIDTH
Use = Callable[[Tensor], Tensor]

COMPOSITES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "transposed rows": lambda m, x: m.layer(x.mT).sum(),
    "rows apart": lambda m, x: m.layer(x[:, ::2]).sum(),
    "rows as they lie": lambda m, x: m.layer(x).sum(),
    "two dimensions": lambda m, x: m.layer(x[0].mT).sum(),
    "no bias": lambda m, x: F.linear(x.mT, m.layer.weight).sum(),
    "classes as vectors": lambda m, x: (F.one_hot(x.argmax(-1), WIDTH) * m.layer(x)).sum(),
    "the largest of windows": lambda m, x: F.max_pool1d(m.layer(x), 2).sum(),
    "the largest of windows, without gradients": lambda m, x: (
        m.layer.weight.sum() * F.max_pool1d(F.max_pool1d(m.layer(x).detach(), 1), 2).sum()
    ),
    "singular values only": lambda m, x: m.layer.weight.sum() * torch.linalg.svdvals(x.detach()).sum(),
    "singular values in a norm": lambda m, x: m.layer.weight.sum() * torch.linalg.matrix_norm(x.detach(), "nuc").sum(),
    "singular values and their gradient": lambda m, x: torch.linalg.svdvals(m.layer(x)).sum(),
    "eigenvalues only": lambda m, x: m.layer.weight.sum() * torch.linalg.eigvals(x.detach()).abs().sum(),
    "eigenvalues of symmetric matrices": lambda m, x: (
        m.layer.weight.sum() * torch.linalg.eigvalsh(x.detach() + x.detach().mT).sum()
    ),
    "as many classes as there are": lambda m, x: m.layer.weight.sum() * F.one_hot(x.argmax(-1)).sum(),
    "vectors of classes only": lambda m, x: m.layer.weight.sum() * F.one_hot(x.argmax(-1), WIDTH).sum(),
}


class Layered(nn.Module):
    """A model with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


def composed(name: str, around: Callable[[], Any] = contextlib.nullcontext) -> Workload:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with around():
            return COMPOSITES[name](model, x)

    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return squared(model, torch.randn(64, 64, WIDTH), optimizer, loss_fn=loss_fn)


BY_VALUES = ("as many classes as there are",)


@pytest.mark.parametrize(
    ("name", "real"), [(name, real) for name in COMPOSITES for real in (False, True) if real or name not in BY_VALUES]
)
def test_the_peak_is_that_of_the_step_that_nothing_watches(name: str, real: bool) -> None:
    assert abs(difference_bytes(partial(composed, name), real=real)) < NBYTES / 100


@pytest.mark.parametrize("name", ["transposed rows", "vectors of classes only"])
def test_the_comparison_notices_what_a_mode_does_otherwise(name: str) -> None:
    assert difference_bytes(partial(composed, name, composites_lifted)) > 0.2 * NBYTES


def assert_as_without_capture(results: Callable[[], Any], **tolerance: Any) -> None:
    """Assert that results under capture, and after it, are what they were."""
    expected = results()
    with composites_without_mode():
        found = results()
    for one in (found, results()):
        torch.testing.assert_close(one, expected, **tolerance)


BITWISE = {"rtol": 0, "atol": 0, "equal_nan": True}


@pytest.mark.parametrize("name", COMPOSITES)
def test_results_and_gradients_are_what_they_were(name: str) -> None:
    model, x = Layered(), torch.randn(4, WIDTH, WIDTH, requires_grad=True)

    def results() -> list[Tensor]:
        loss = COMPOSITES[name](model, x)
        inputs = [x, *model.parameters()]
        return [loss, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]

    assert_as_without_capture(results, **BITWISE)


def test_a_number_of_classes_that_is_none_is_pytorchs_own_error() -> None:
    with composites_without_mode(), pytest.raises(RuntimeError, match="num_classes"):
        F.one_hot(torch.zeros(3, dtype=torch.long), -2)


# Backward passes of their own


SAMPLES, LENGTH, FEATURES = 8, 24, 16
LEVERS = Levers(microbatch_size=SAMPLES)
SELECTED = pytest.mark.xfail(
    torch.__version__.startswith("2.11."), reason="copies by masks and reads zeros under a mode until 2.12", strict=True
)


def rendered(x: Tensor) -> Tensor:
    """Return colours weighted by the light that passes what is before them, as neural radiance fields do."""
    opacity = x.sigmoid()
    ones = torch.ones_like(opacity[:, :1])
    passed = torch.cumprod(torch.cat([ones, 1 - opacity + 1e-10], 1), 1)[:, :-1]
    return (opacity * passed * x.tanh()).sum(1)


def scheduled(x: Tensor) -> Tensor:
    """Return a product as long as it holds no zero: of complex numbers, along the last dimension."""
    return torch.view_as_real(torch.polar(x.sigmoid(), x).prod(-1)).sum(-1)


USES: dict[str, Use] = {
    "product along a dimension": lambda x: x.sigmoid().prod(1),
    "product with zeros": lambda x: x.relu().prod(1, keepdim=True),
    "product in another dtype": lambda x: x.sigmoid().prod(-1, dtype=torch.float64).float(),
    "product of a line": lambda x: x[:, :1].relu().prod(1),
    "product of all": lambda x: x.sigmoid().prod(),
    "product of all with one zero": lambda x: (
        x.sigmoid().index_fill(0, torch.tensor(0), 0.5)[0].relu().prod() * x.mean()
    ),
    "product of all with zeros": lambda x: x.relu().prod(),
    "complex product": scheduled,
    "cumulative product": lambda x: x.sigmoid().cumprod(1),
    "cumulative product with zeros": lambda x: x.relu().cumprod(-1),
    "cumulative product of columns": lambda x: x.sigmoid().mT.cumprod(1),
    "rendering": rendered,
    "recomputed": lambda x: checkpoint(rendered, x, use_reentrant=False),
    "differentiated apart": lambda x: x * torch.func.grad(lambda y: y.sigmoid().cumprod(1).sum())(x.detach()),
}


def workload(use: Use, *, on_meta: bool = False, around: Callable[[], Any] = contextlib.nullcontext) -> Workload:
    torch.manual_seed(2)
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Function(use))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        with around():
            return model(x).mean()

    return squared(model, torch.randn(SAMPLES, LENGTH, FEATURES), optimizer, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SELECTED] if name == "cumulative product with zeros" else []) for name in USES]
)
def test_the_peak_is_that_of_the_formula_that_runs(name: str) -> None:
    assert_predicted(workload(USES[name]))


@SELECTED
def test_the_comparison_notices_the_formula_for_zeros() -> None:
    predicted, measured = peaks(workload(rendered, around=composites_lifted), LEVERS)
    assert predicted > 1.2 * measured


@pytest.mark.parametrize("use", [USES["product along a dimension"], rendered])
def test_without_data_the_larger_formula_is_predicted_and_said_to_be_a_guess(use: Use) -> None:
    device = find_device("cpu")
    trace = capture_levers(workload(use, on_meta=True), LEVERS, device)
    predicted = predict(trace, costs_of([trace], device), device)[0]
    _, measured = peaks(workload(use), LEVERS)
    assert predicted.peak_bytes > measured
    assert any("a guess" in note for note in trace.notes)


def derivatives(run: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a result, its gradients once without and once with a graph, and the gradients of the latter."""
    first = torch.autograd.grad(run().abs().sum(), inputs)
    second = torch.autograd.grad(run().abs().sum(), inputs, create_graph=True)
    loss = sum(part.abs().sum() for part in second)
    third = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [run(), *first, *second, *third]


FACTORS: dict[str, Use] = {
    "all": lambda x: x.prod(),
    "along": lambda x: x.prod(1),
    "kept": lambda x: x.prod(-1, keepdim=True),
    "cumulative": lambda x: x.cumprod(-2),
    "cumulative in another dtype": lambda x: x.cumprod(0, dtype=torch.complex128 if x.is_complex() else torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("zeros", [0.0, 0.02, 0.2, 0.9])
@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 1, 3), (1, 1, 1), (0, 3, 2), ()])
def test_gradients_of_products_are_what_they_were(shape: tuple[int, ...], zeros: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    given = torch.randn(shape, dtype=dtype) * (torch.rand(shape) >= zeros)

    def results(use: Use) -> list[Tensor]:
        x = given.clone().requires_grad_()
        return derivatives(lambda: use(x), (x,))

    for use in FACTORS.values() if shape else [FACTORS["all"]]:
        assert_as_without_capture(partial(results, use), **BITWISE)


REFLECTORS = [((6, 4), 4), ((3, 7, 5), 3), ((2, 2, 4, 4), 4), ((5, 1), 1)]


def orthogonal(columns: int, rows: int) -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(columns, rows), orthogonal_map="householder")


class Products(nn.Module):
    """Reflectors of several matrices, fewer than their columns."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.vectors, self.factors = (
            nn.Parameter(0.1 * torch.randn(3, 200, 90)),
            nn.Parameter(0.1 * torch.rand(3, count)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.householder_product(self.vectors, self.factors).square().mean()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: orthogonal(400, 50), id="more columns"),
        pytest.param(lambda: orthogonal(50, 400), id="more rows"),
        pytest.param(lambda: Products(60), id="as many factors", marks=pytest.mark.ci),
        pytest.param(lambda: Products(30), id="fewer factors"),
    ],
)
def test_the_peak_of_reflectors_is_that_of_the_formula_that_runs(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    made = model()
    columns = made.in_features if isinstance(made, nn.Linear) else 8
    assert_predicted(squared(made, torch.randn(16, columns)), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("with_factors", [True, False])
@pytest.mark.parametrize(("shape", "count"), REFLECTORS)
def test_gradients_of_reflectors_are_what_they_were(
    shape: tuple[int, ...], count: int, with_factors: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    vectors = torch.randn(shape, dtype=dtype)
    factors = 0.1 * torch.rand((*shape[:-2], count), dtype=torch.float64).to(dtype)

    def results() -> list[Tensor]:
        given, tau = vectors.clone().requires_grad_(), factors.clone().requires_grad_(with_factors)
        inputs = (given, tau) if with_factors else (given,)
        return derivatives(lambda: torch.linalg.householder_product(given, tau), inputs)

    assert_as_without_capture(results)

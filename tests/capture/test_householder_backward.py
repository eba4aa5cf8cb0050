"""Products of Householder reflectors: their backward pass is predicted as it runs, and gives what it gave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from memfit.capture.composites import composites_without_mode
from memfit.ir.plan import Levers
from memfit.workload import Workload
from tests.measuring import peaks

SHAPES = [((6, 4), 4), ((3, 7, 5), 3), ((2, 2, 4, 4), 4), ((5, 1), 1)]


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
def test_the_peak_is_that_of_the_formula_that_runs(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    made = model()
    columns = made.in_features if isinstance(made, nn.Linear) else 8
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    workload = Workload(made, torch.randn(16, columns), lambda m, x: m(x).square().mean(), optimizer)
    predicted, measured = peaks(workload, Levers(microbatch_size=16))
    assert predicted == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("with_factors", [True, False])
@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_gradients_are_what_they_were(
    shape: tuple[int, ...], count: int, with_factors: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    vectors = torch.randn(shape, dtype=dtype)
    factors = 0.1 * torch.rand((*shape[:-2], count), dtype=torch.float64).to(dtype)

    def results() -> list[Tensor]:
        given, tau = vectors.clone().requires_grad_(), factors.clone().requires_grad_(with_factors)
        inputs = (given, tau) if with_factors else (given,)
        found = torch.linalg.householder_product(given, tau)
        first = torch.autograd.grad(found.abs().sum(), inputs, retain_graph=True)
        second = torch.autograd.grad(found.abs().sum(), inputs, create_graph=True)
        loss = sum(part.abs().sum() for part in second)
        third = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        return [found, *first, *second, *third]

    expected = results()
    with composites_without_mode():
        found = results()
    torch.testing.assert_close(found, expected)

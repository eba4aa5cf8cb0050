"""Operators composed of others: under capture they run as in a step that nothing watches, and give what they gave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.capture.composites import composites_without_mode
from memfit.workload import Workload
from tests.capture.steps import difference_bytes, squared

WIDTH = 64
NBYTES = 4 * 64 * 64 * WIDTH

USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
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


def workload(name: str) -> Workload:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return squared(model, torch.randn(64, 64, WIDTH), optimizer, loss_fn=USES[name])


BY_VALUES = ("as many classes as there are",)


@pytest.mark.parametrize(
    ("name", "real"), [(name, real) for name in USES for real in (False, True) if real or name not in BY_VALUES]
)
def test_the_peak_is_that_of_the_step_that_nothing_watches(name: str, real: bool) -> None:
    assert abs(difference_bytes(partial(workload, name), real=real)) < NBYTES / 100


@pytest.mark.parametrize("name", ["transposed rows", "vectors of classes only"])
def test_the_comparison_notices_what_a_mode_does_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("memfit.capture.composites._KEYS", ())
    assert difference_bytes(partial(workload, name)) > 0.2 * NBYTES


@pytest.mark.parametrize("name", USES)
def test_results_and_gradients_are_what_they_were(name: str) -> None:
    model, x = Layered(), torch.randn(4, WIDTH, WIDTH, requires_grad=True)

    def results() -> list[Tensor]:
        loss = USES[name](model, x)
        return [loss, *torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)]

    expected = results()
    with composites_without_mode():
        found = results()
    again = results()
    for one in (found, again):
        assert all(a is b or torch.equal(a, b) for a, b in zip(one, expected, strict=True))


def test_a_number_of_classes_that_is_none_is_pytorchs_own_error() -> None:
    with composites_without_mode(), pytest.raises(RuntimeError, match="num_classes"):
        F.one_hot(torch.zeros(3, dtype=torch.long), -2)

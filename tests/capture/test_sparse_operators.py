"""Steps with sparse gradients: their predicted peaks are those that the allocator reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import CaptureError
from memfit.pipeline import gradient_difference, same_gradient
from memfit.workload import Workload
from tests.capture.steps import assert_predicted, squared
from tests.covering import some

_ROWS, _WIDTH = 900, 32


class _Tables(nn.Module):
    """Looks rows up in sparse tables, some of them twice, and adds them up."""

    def __init__(self, tables: list[nn.Module], lookups: list[int], head: bool = False) -> None:
        super().__init__()
        self.tables, self.lookups, self.head = nn.ModuleList(tables), lookups, head
        self.out = nn.Linear(_WIDTH, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = sum(self.tables[which](ids.roll(i, 0)) for i, which in enumerate(self.lookups))
        return F.linear(found, self.tables[0].weight) if self.head else self.out(found)


def _table(**options: Any) -> nn.Embedding:
    return nn.Embedding(_ROWS, _WIDTH, sparse=True, **options)


def _bag(mode: str) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(_ROWS, _WIDTH, sparse=True, mode=mode)


_MODELS: dict[str, Callable[[], _Tables]] = {
    "one table": lambda: _Tables([_table()], [0]),
    "padded": lambda: _Tables([_table(padding_idx=3)], [0]),
    "several tables": lambda: _Tables([_table(), _table(), _table()], [0, 1, 2]),
    "tied": lambda: _Tables([_table(), _table()], [0, 0, 1]),
    "bag of means": lambda: _Tables([_bag("mean")], [0]),
    "bags of sums": lambda: _Tables([_bag("sum"), _bag("sum")], [0, 1]),
    "a dense head of the same weight": lambda: _Tables([_table()], [0], head=True),
}


_OPTIMIZERS: dict[str, Callable[[_Tables], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.01),
}


def _workload(name: str, optimizer: str, *, rows: int, length: int = 12, clip: float | None = None) -> Workload:
    torch.manual_seed(0)
    model = _MODELS[name]()
    ids = torch.randint(0, _ROWS, (rows, length))
    return squared(model, ids, _OPTIMIZERS[optimizer](model), max_grad_norm=clip)


@pytest.mark.parametrize("optimizer", sorted(_OPTIMIZERS))
@pytest.mark.parametrize("name", sorted(set(_MODELS) - {"a dense head of the same weight"}))
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_predicted_peaks_are_measured(name: str, optimizer: str) -> None:
    assert_predicted(_workload(name, optimizer, rows=96))


@pytest.mark.parametrize(
    ("name", "optimizer", "clip"),
    [
        ("one table", "SGD", None),
        pytest.param("one table", "SparseAdam", None, marks=pytest.mark.ci),
        pytest.param("tied", "SGD", 0.5, marks=pytest.mark.ci),
        pytest.param("tied", "SparseAdam", 0.5, marks=pytest.mark.ci),
        ("bag of means", "SparseAdam", None),
        ("a dense head of the same weight", "SGD", 0.5),
    ],
)
def test_clipped_and_accumulated_gradients_are_predicted(name: str, optimizer: str, clip: float | None) -> None:
    for size in (64, 32, 16):
        assert_predicted(_workload(name, optimizer, rows=64, clip=clip), size)


@pytest.mark.ci
def test_plans_with_sparse_gradients_are_verified() -> None:
    workload = _workload("bag of means", "SparseAdam", rows=16)
    budget = int(1.5 * memfit.estimate(workload).peak_bytes)
    plan = memfit.plan(workload, budget=budget, precisions=["32-true"], points=1)
    found = memfit.verify(plan, workload, steps=0)
    assert found.failures == [] and found.bitwise
    gradient = torch.sparse_coo_tensor([[0, 3, 3]], torch.ones(3, 2), (5, 2), check_invariants=False)
    assert same_gradient(gradient, gradient.coalesce()) and not same_gradient(gradient, gradient * 1.5)
    assert gradient_difference([(gradient * 1.5, gradient)]) == pytest.approx(0.5)
    assert gradient_difference([(gradient.to_dense(), gradient)]) == 0.0


@pytest.mark.parametrize("name", some(["one table", "bag of means"], ["one table"]))
def test_more_microbatches_than_a_capture_runs_are_left_out_by_name(name: str) -> None:
    """Each adds entries, so that none stands for the others: thousands would take minutes."""
    workload = _workload(name, "SGD", rows=2048, length=1)
    with pytest.raises(
        CaptureError, match="2,048 microbatches add up sparse gradients.*Give a larger microbatch_size="
    ):
        memfit.estimate(workload, microbatch_size=1)
    assert memfit.estimate(workload, microbatch_size=1024).peak_bytes > 0
    plan = memfit.plan(workload, budget="1.5x", points=1)
    assert any("microbatch 1: left out" in note for note in plan.notes)


def test_many_lookups_of_few_rows() -> None:
    assert_predicted(_workload("one table", "SGD", rows=128, length=64))


def _near(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (torch.cdist(batch["x"], batch["x"]) < 6.5).float()


_Use = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
_SELECTIONS: dict[str, _Use] = {
    "a graph": lambda m, b: torch.sparse.mm(_near(b).to_sparse(), m(b["x"])),
    "its square": lambda m, b: torch.sparse.mm(torch.sparse.mm(_near(b).to_sparse(), _near(b).to_sparse()), m(b["x"])),
    "a graph of known links": lambda m, b: torch.sparse.mm((b["links"] > 7).float().to_sparse(), m(b["x"])),
    "values by a mask": lambda m, b: m(b["x"]).masked_select(b["links"][:, :64] > 3),
    "values by a mask of rows": lambda m, b: m(b["x"]).masked_select(b["rows"][:, None] > 0),
    "values by their own": lambda m, b: (y := m(b["x"])).masked_select(y.detach() > 0.2),
    "rows by a mask": lambda m, b: m(b["x"])[b["rows"] > 0],
    "a layer of least squares": lambda m, b: torch.linalg.lstsq(m(b["x"]), b["x"]).solution,
    "several of them": lambda m, b: torch.linalg.lstsq(m(b["x"]).view(4, 128, 64)[..., :9], b["x"].view(4, 128, 64))[0],
}


def _selecting(name: str, device: str = "cpu", **more: torch.Tensor) -> Workload:
    torch.manual_seed(4)
    with torch.device(device):
        model = nn.Linear(64, 64)
    batch = {"x": torch.randn(512, 64), **more}
    loss_fn = lambda m, b: _SELECTIONS[name](m, b).square().mean()  # noqa: E731
    return squared(model, batch, torch.optim.SGD(model.parameters(), lr=1e-9), loss_fn=loss_fn, batch_size=1)


@pytest.mark.parametrize("name", sorted(_SELECTIONS))
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_values_select_is_predicted(name: str) -> None:
    numbers = torch.Generator().manual_seed(4)
    links, rows = (torch.randint(9, (512, 512), generator=numbers), torch.randint(2, (512,), generator=numbers))
    assert_predicted(_selecting(name, links=links, rows=rows), 1, rel=1e-3)


def test_without_data_all_entries_are_predicted_and_said_to_be_a_guess() -> None:
    guess, plain = _selecting("a graph", "meta"), _selecting("a graph")
    guessed, known = memfit.estimate(guess, device="cpu"), memfit.estimate(plain)
    assert guessed.peak_bytes > known.peak_bytes + 512 * 512 * 8
    assert any("_to_sparse of float32[512, 512]" in note and "select everything" in note for note in guessed.notes)
    assert not any("guess" in note for note in known.notes)

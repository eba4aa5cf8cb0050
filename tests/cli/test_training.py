"""Freed memory goes back at once where a command owns the process and its plan needs that; nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

import memfit
from memfit.cli import run, training
from memfit.errors import BudgetError
from memfit.hardware import heap
from memfit.ir.plan import Plan
from memfit.units import read_budget
from tests.workloads import tiny

GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(tiny(), budget="2x", numerics="exact", precisions=["32-true"], points=1)


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether this process was to return freed memory, which it is not to do for the tests after these."""
    asked: list[bool] = []

    def noted() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(heap, "return_freed_memory", noted)
    monkeypatch.setattr(heap, "is_set_by_user", lambda: False)
    for module in (training, run):
        monkeypatch.setattr(module, "free_bytes", lambda: 2 * GIB)
    yield asked


@pytest.mark.parametrize(
    ("peak_bytes", "host_budget", "is_spared"),
    [
        (GIB // 2, None, False),
        (GIB // 2 + 1, None, True),
        (GIB // 4, "1GiB", False),
        (GIB // 4 + 1, "1GiB", True),
        (GIB // 4 + 1, "50%", True),
        (GIB // 2 + 1, "64GiB", True),  # the machine has no more than it has
    ],
)
def test_training_where_there_is_little_room(
    plan: Plan,
    returned: list[bool],
    capsys: pytest.CaptureFixture[str],
    peak_bytes: int,
    host_budget: str | None,
    is_spared: bool,
) -> None:
    large = replace(plan, predicted=replace(plan.predicted, peak_upper_bytes=peak_bytes))
    training.spare_memory(large, host_budget)
    assert bool(returned) == is_spared
    assert ("goes back to the system at once" in capsys.readouterr().err) == is_spared


def test_training_on_a_gpu_leaves_the_heap_alone(plan: Plan, returned: list[bool]) -> None:
    large = replace(plan, device="a100-80gb", predicted=replace(plan.predicted, peak_upper_bytes=64 * GIB))
    training.spare_memory(large, None)
    assert not returned


def test_training_with_a_host_budget_that_says_nothing(plan: Plan) -> None:
    with pytest.raises(BudgetError, match="host_budget"):
        training.spare_memory(plan, "much")


@pytest.mark.parametrize(
    ("budget", "is_spared"), [("512MiB", False), ("600MiB", True), ("90%", False), ("0.5x", False)]
)
def test_scripts_with_a_budget_in_bytes(budget: str, is_spared: bool, returned: list[bool]) -> None:
    run._spare_memory(read_budget(budget))
    assert bool(returned) == is_spared


def test_scripts_on_a_gpu(returned: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run._spare_memory(read_budget("40GiB"))
    assert not returned

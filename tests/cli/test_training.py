"""What becomes of freed memory where a command owns the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import memfit
from memfit import hardware
from memfit.cli import app, training
from memfit.errors import BudgetError
from memfit.foundations import read_budget
from memfit.ir import Plan
from memfit.planner import PlanOptions
from memfit.training import RunOptions
from tests.workloads import tiny

GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memfit.plan(tiny(), budget="2x", numerics="exact", precisions=["32-true"], points=1)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process was to do with freed memory, which it is not to do for the tests after these."""
    asked: list[str] = []

    def noted(way: str) -> bool:
        asked.append(way)
        return True

    monkeypatch.setattr(hardware.heap, "return_freed_memory", lambda: noted("returned"))
    monkeypatch.setattr(hardware.heap, "keep_freed_memory", lambda: noted("kept"))
    monkeypatch.setattr(hardware.heap, "is_set_by_user", lambda: False)
    for module in (training, app):
        monkeypatch.setattr(module, "free_bytes", lambda: 2 * GIB)
    return asked


@pytest.mark.parametrize(
    ("peak_bytes", "host_budget", "way"),
    [
        (GIB // 2, None, "kept"),
        (GIB // 2 + 1, None, "returned"),
        (GIB // 4, "1GiB", "kept"),
        (GIB // 4 + 1, "1GiB", "returned"),
        (GIB // 4 + 1, "50%", "returned"),
        (GIB // 2 + 1, "64GiB", "returned"),  # the machine has no more than it has
    ],
)
def test_training_by_the_room_that_there_is(
    plan: Plan,
    ways: list[str],
    capsys: pytest.CaptureFixture[str],
    peak_bytes: int,
    host_budget: str | None,
    way: str,
) -> None:
    large = replace(plan, predicted=replace(plan.predicted, peak_upper_bytes=peak_bytes))
    training.settle_memory(large, host_budget)
    assert ways == [way]
    assert ("returns freed memory to the system at once" in capsys.readouterr().err) == (way == "returned")


@pytest.mark.parametrize(("runs_plain", "way"), [(False, "kept"), (True, "returned")])
def test_the_plain_step_needs_room_where_it_runs_too(plan: Plan, ways: list[str], runs_plain: bool, way: str) -> None:
    large = replace(plan, plain=replace(plan.plain, peak_upper_bytes=GIB))
    training.settle_memory(large, runs_plain=runs_plain)
    assert ways == [way]


def test_training_on_a_gpu_leaves_the_heap_alone(plan: Plan, ways: list[str]) -> None:
    large = replace(plan, device="a100-80gb", predicted=replace(plan.predicted, peak_upper_bytes=64 * GIB))
    training.settle_memory(large)
    assert not ways


def test_training_with_a_host_budget_that_says_nothing(plan: Plan) -> None:
    with pytest.raises(BudgetError, match="host_budget"):
        training.settle_memory(plan, "much")


@pytest.mark.parametrize(
    ("budget", "found"), [("512MiB", ["kept"]), ("600MiB", ["returned"]), ("90%", []), ("0.5x", [])]
)
def test_scripts_with_a_budget_in_bytes(budget: str, found: list[str], ways: list[str]) -> None:
    training._settle_memory(read_budget(budget))
    assert ways == found


def test_scripts_on_a_gpu(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.accelerators, "current_kind", lambda: "cuda")
    training._settle_memory(read_budget("40GiB"))
    assert not ways


@pytest.mark.parametrize(
    ("budget", "device", "found"),
    [("512MiB", None, ["kept"]), ("600MiB", None, []), ("0.9x", None, []), ("512MiB", "a100-80gb", [])],
)
def test_planning_measures_steps_as_training_runs_them(
    budget: str, device: str | None, found: list[str], ways: list[str], monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    monkeypatch.setattr(app, "load_for", lambda *_: tiny())
    monkeypatch.setattr(memfit.pipeline, "plan", lambda *args, **kwargs: plan)
    app.plan("tests.workloads:tiny", PlanOptions(budget, device, world_size=1))
    assert ways == found


@pytest.mark.parametrize(("code_seconds", "said"), [(0.0, "prepare"), (45.6, "prepare, make code (about 45.60 s)")])
def test_the_bar_says_how_long_code_takes_to_make(
    plan: Plan, code_seconds: float, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = replace(plan, code_seconds=code_seconds)
    training.train_with_bar(compiled, tiny(), RunOptions(out=tmp_path / "run", steps=1))
    lines = capsys.readouterr().err.splitlines()
    assert any(line == said or line.startswith(f"{said}: ") for line in lines), lines

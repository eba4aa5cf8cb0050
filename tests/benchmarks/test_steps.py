"""The second zoo: its figures on rows made up, its table, the plain loop, and a sample of its steps."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.steps import __main__ as steps
from benchmarks.steps.__main__ import QUICK, isolated
from benchmarks.steps.cases import KINDS, SHARES, cases
from benchmarks.steps.figures import line, summarised
from benchmarks.steps.loop import Trained, difference, trained_by_plan, trained_plainly
from benchmarks.steps.rows import Rows
from benchmarks.steps.zoo import FAMILIES, STEPS
from memfit import Workload, plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MORE = pytest.mark.ci
SAMPLE = (
    "nearest_points",
    pytest.param("running_weights", marks=MORE),
    pytest.param("hard_triplets", marks=MORE),
)
"""Steps that take little: a branchless one, one whose loss reads values, one that selects by value."""


def row(workload: str, kind: str = "plain", *, predicted: int = 100, measured: int = 100, **more: Any) -> Any:
    return {
        "workload": workload,
        "kind": kind,
        "predicted_peak_bytes": predicted,
        "peak_upper_bytes": predicted + 2,
        "measured_peak_bytes": measured,
        "error": predicted / measured - 1,
        **({} if kind == "plain" else {"budget_bytes": 60}),
        **({"bitwise": True} if kind == "exact" else {}),
        **more,
    }


REFUSED = {"kind": "reordered", "refused": "CaptureError: no values"}
RIGHT = [row("a"), row("a", "exact", predicted=60, measured=60), row("a", "reordered", predicted=45, measured=45)]


def test_a_zoo_without_faults_has_none() -> None:
    assert summarised(RIGHT) == {
        "steps": 1,
        "refused": 0,
        "median_abs_error": 0.0,
        "p95_abs_error": 0.0,
        "above_upper_end": 0,
        "over_budget": 0,
        "exact_plans": 1,
        "exact_bitwise": 1,
    }


def test_errors_are_over_plain_and_planned_rows_and_the_95th_percentile_is_the_nearest_rank() -> None:
    found = summarised([row(f"w{i}", predicted=100 + i) for i in range(100)])
    assert found["steps"] == 100
    assert found["median_abs_error"] == pytest.approx(0.495)
    assert found["p95_abs_error"] == pytest.approx(0.94)


@pytest.mark.parametrize(
    ("wrong", "changed"),
    [
        (row("b", measured=103), {"steps": 2, "above_upper_end": 1}),
        (row("b", measured=102), {"steps": 2}),
        (row("a", "reordered", predicted=60, measured=61), {"over_budget": 1}),
        (row("a", "exact", predicted=60, measured=60, bitwise=False, difference="w"), {"exact_plans": 2}),
        ({"workload": "a", **REFUSED}, {"refused": 1}),
        ({"workload": "b", **REFUSED}, {"steps": 2, "refused": 1}),
    ],
)
def test_what_is_wrong_with_a_row_is_counted(wrong: Any, changed: dict[str, int]) -> None:
    before, after = summarised(RIGHT), summarised([*RIGHT, wrong])
    counts = {key: after[key] for key in before if not key.endswith("error")}
    assert counts == {**{key: before[key] for key in counts}, **({"exact_plans": 1, "exact_bitwise": 1} | changed)}


def test_a_workload_that_is_refused_twice_counts_once_and_a_plan_that_fails_when_run_is_no_exact_one() -> None:
    failed = {"workload": "a", "kind": "exact", "budget_bytes": 60, "predicted_peak_bytes": 60, "refused": "it raised"}
    found = summarised([failed, {"workload": "a", **REFUSED}])
    assert (found["refused"], found["exact_plans"], found["exact_bitwise"]) == (1, 1, 0)
    assert found["median_abs_error"] is None


def test_a_line_shows_what_is_wrong() -> None:
    assert "ABOVE THE UPPER END" in line(row("a", measured=103))
    assert "OVER BUDGET" in line(row("a", "exact", predicted=60, measured=61))
    assert "NOT BITWISE: w differs" in line(row("a", "exact", bitwise=False, difference="w differs"))
    assert "REFUSED CaptureError" in line({"workload": "a", **REFUSED})


def _functions(family: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a family that make workloads, without importing it."""
    module = ast.parse((BENCHMARKS / "steps" / f"{family}.py").read_text())
    found = [node for node in module.body if isinstance(node, ast.FunctionDef) and not node.args.args]
    return {f.name: f for f in found if isinstance(f.returns, ast.Name) and f.returns.id == "Workload"}


def test_the_table_has_each_function_of_its_families_by_the_name_of_its_workload() -> None:
    for family, names in FAMILIES.items():
        functions = _functions(family)
        assert sorted(functions) == sorted(names)
        for name, function in functions.items():
            assert name in {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}


def test_there_are_60_steps_and_more_that_the_first_zoo_has_not() -> None:
    makers = next(
        node.value
        for node in ast.parse((BENCHMARKS / "zoo" / "__init__.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_MAKERS"
    )
    assert isinstance(makers, ast.Tuple)
    first = {node.attr for node in makers.elts if isinstance(node, ast.Attribute)}
    assert len(first) > 25 and not first & STEPS.keys()
    assert len(STEPS) == sum(map(len, FAMILIES.values())) >= 60
    assert set(QUICK) <= STEPS.keys()


@pytest.mark.ci
def test_a_workload_whose_process_dies_gives_a_refusal_for_each_of_its_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = list(isolated("no such workload", "benchmarks.steps.zoo:STEPS"))
    assert [row["kind"] for row in rows] == list(KINDS)
    assert all(row["refused"] == "exit status 1" and row["workload"] == "no such workload" for row in rows)
    assert "KeyError" in capsys.readouterr().err


def test_rows_keep_the_order_of_their_workloads_however_many_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_a_while(name: str, table: str, python: str) -> Any:
        time.sleep(0.05 * (3 - int(name)))
        return ({"workload": name, **REFUSED} for _ in range(2))

    monkeypatch.setattr(steps, "isolated", after_a_while)
    for jobs in (1, 3):
        rows = steps.measured("123", "a table", jobs=jobs)
        assert [case["workload"] for case in rows] == ["1", "1", "2", "2", "3", "3"]


def test_a_run_that_was_cut_short_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def counted(name: str, table: str, python: str) -> Any:
        asked.append(name)
        ended = {} if name == "3" else {"seconds": 1.0}
        return iter([{"workload": name, **REFUSED, **ended}])

    monkeypatch.setattr(steps, "isolated", counted)
    path = tmp_path / "rows.jsonl"
    first = steps.measured("123", "a table", before=Rows(path))
    with path.open("a") as file:
        file.write('{"source": "cut sh')
    assert steps.measured("123", "a table", before=Rows(path)) == first
    assert asked == ["1", "2", "3", "3"]  # the process of the third died
    monkeypatch.setattr("benchmarks.steps.rows.source", lambda: "another memfit")
    steps.measured("12", "a table", before=Rows(path))
    assert asked == ["1", "2", "3", "3", "1", "2"]
    assert [json.loads(line)["workload"] for line in path.read_text().splitlines()] == ["1", "2", "1", "2"]


def _tiny() -> Workload:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    return Workload(model, torch.randn(64, 8), lambda m, x: m(x).square().mean(), optimizer, max_grad_norm=0.01)


def test_a_bit_of_a_weight_a_buffer_or_a_loss_is_seen() -> None:
    plain, again = trained_plainly(_tiny), trained_plainly(_tiny)
    assert difference(plain, again) is None
    for name in ("0.weight", "1.running_mean"):
        moved = plain.tensors[name].clone()
        moved.view(-1)[3] = torch.nextafter(moved.view(-1)[3], torch.tensor(9.0))
        found = difference(plain, Trained(plain.losses, {**plain.tensors, name: moved}))
        assert found is not None and f"first {name}" in found
    losses = difference(plain, Trained([plain.losses[0], plain.losses[1] + 1e-7], plain.tensors))
    assert losses is not None and "losses" in losses
    assert difference(plain, Trained(plain.losses, {})) is not None


def test_a_minus_zero_and_a_number_that_is_none_are_told_apart_by_their_bits() -> None:
    zero, nan = Trained([0.0], {"w": torch.zeros(2)}), Trained([0.0], {"w": torch.full((2,), torch.nan)})
    assert difference(zero, Trained([0.0], {"w": -torch.zeros(2)})) is not None
    assert difference(nan, Trained([0.0], {"w": torch.full((2,), torch.nan)})) is None


def test_the_plain_loop_draws_what_the_steps_of_a_plan_draw() -> None:
    made = plan(_tiny(), budget="1GiB", numerics="exact", points=1)
    assert difference(trained_plainly(_tiny), trained_by_plan(_tiny, made)) is None


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_predicted_and_its_exact_plan_is_bitwise(name: str) -> None:
    rows = {case["kind"]: case for case in cases(STEPS[name])}
    assert list(rows) == list(KINDS)
    found = summarised([{"workload": name, **case} for case in rows.values()])
    assert found["refused"] == found["above_upper_end"] == found["over_budget"] == 0
    assert found["exact_plans"] == found["exact_bitwise"] == 1
    assert found["p95_abs_error"] <= 0.01
    for kind in SHARES:
        assert rows[kind]["budget_bytes"] < rows["plain"]["measured_peak_bytes"]

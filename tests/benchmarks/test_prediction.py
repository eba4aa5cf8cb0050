"""The prediction benchmark: its figures, its tables and its error bars, on cases made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.calibration import calibrated, leave_one_out
from benchmarks.prediction import _isolated, accuracy, summarised
from benchmarks.tables import cases_table, summary_table

MIB = 2**20


def case(
    workload: str, kind: str = "plain", *, predicted: int = 100, measured: int = 100, **more: Any
) -> dict[str, Any]:
    rivals = {"a rule": 50 * MIB, "one that fails": None} if kind == "plain" else None
    return {
        "workload": workload,
        "precision": "32-true",
        "kind": kind,
        "predicted_peak_bytes": predicted * MIB,
        "peak_upper_bytes": (predicted + 2) * MIB,
        "measured_peak_bytes": measured * MIB,
        "workspace_bytes": 10 * MIB,
        "error": predicted / measured - 1,
        **({"rivals": rivals} if rivals else {"budget_bytes": 60 * MIB}),
        **more,
    }


FAILED = {"workload": "b", "precision": "32-true", "kind": "planned", "error_message": "CaptureError: no values"}
CASES = [
    case("a", measured=103),
    case("a", "planned", predicted=60, measured=61),
    case("b", measured=80),
    FAILED,
]
RESULT = {
    "command": "python -m benchmarks.prediction",
    "machine": {"description": "a machine", "threads": 2},
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-01",
    "cases": CASES,
    "summary": summarised(CASES),
}


def test_errors_are_relative_to_the_measured_peak_and_underestimates_to_the_upper_end() -> None:
    found = accuracy([(90, 95, 100), (110, 120, 100), (100, 100, 100), (101, 101, 100)])
    assert found["cases"] == 4
    assert found["median_abs_error"] == pytest.approx(0.055)
    assert found["p95_abs_error"] == found["largest_abs_error"] == pytest.approx(0.1)
    assert found["underestimate_rate"] == 0.25


def test_the_95th_percentile_is_below_the_largest_of_many() -> None:
    assert accuracy([(100 + i, 200, 100) for i in range(100)])["p95_abs_error"] == pytest.approx(0.94)


def test_failures_are_counted_and_rivals_are_held_to_the_plain_steps() -> None:
    found = RESULT["summary"]
    assert (found["cases"], found["failed"], found["planned"], found["over_budget"]) == (3, 1, 1, 1)
    assert found["underestimate_rate"] == pytest.approx(1 / 3)
    assert found["rivals"]["a rule"]["cases"] == 2 and found["rivals"]["a rule"]["underestimate_rate"] == 1
    assert found["rivals"]["one that fails"] == {"cases": 0, "failed": 2}


def test_the_table_has_every_workload_its_failures_and_the_rivals() -> None:
    table = f"{cases_table(RESULT)}\n{summary_table(RESULT)}"
    assert "| a | 103.0 MiB | -2.91% | 61.0 MiB | -1.64% |" in table
    assert "| b | 80.0 MiB | 25.00% | failed | CaptureError |" in table
    assert "| a rule, plain | 2 | 0 |" in table and "1 of 1 planned steps went over" in table
    assert "| one that fails, plain | 0 | 2 |" in table


@pytest.mark.ci  # `make test` has it of `benchmarks.steps`, by the same function
def test_a_workload_whose_process_dies_gives_a_failure_for_each_of_its_cases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = list(_isolated("no such workload", "cpu"))
    assert len(rows) == 4 and {row["workload"] for row in rows} == {"no such workload"}
    assert all(row["error_message"] == "exit status 1" for row in rows)
    assert "Error" in capsys.readouterr().err


def test_each_workload_is_held_to_the_bar_of_the_others() -> None:
    scores = [(f"w{i}", 0.01) for i in range(60)] + [("odd", 0.5), ("odd", 0.0)]
    found = leave_one_out(scores, 0.98)
    assert [covered for name, covered in found if name == "odd"] == [False, True]
    assert all(covered for name, covered in found if name != "odd")


def test_a_calibration_tells_where_it_comes_from_and_is_wider_without_workspaces() -> None:
    cases = [case(f"w{i}", predicted=100, measured=100 + i % 3) for i in range(120)] + [FAILED]
    found = calibrated({**RESULT, "cases": cases}, "a file")
    assert (found.source, found.cases, found.workloads, found.torch_version) == ("a file", 120, 120, "2.13.0")
    assert found.peak_error == found.quantile == pytest.approx(0.02)
    assert found.unmeasured_peak_error == pytest.approx(102 / 90 - 1)
    assert found.coverage == found.unmeasured_coverage == found.workloads_covered == 1


def test_the_bar_in_use_is_not_below_the_floor() -> None:
    exact = calibrated({**RESULT, "cases": [case(f"w{i}") for i in range(60)]}, "a file")
    assert exact.quantile == 0 and exact.peak_error == exact.floor > 0

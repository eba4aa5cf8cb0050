"""What the trainings in Jittor say is judged as in PyTorch, and the page has what the result file has."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.parity.in_jittor import MARGIN, USES, judged, summary_of, uses_table, verdicts, verdicts_table
from benchmarks.tables import results
from tests.docs.pages import DOCS, words_of

MIB = 2**20


def case(condition: str, seed: int, metric: float, weights: str, peak_bytes: int = 2 * MIB) -> dict[str, Any]:
    return {
        "kind": "run",
        "condition": condition,
        "seed": seed,
        "steps": 10,
        "metric": metric,
        "weights": weights,
        "skips": seed,
        "cpu_seconds": 1.0 if condition == "plain" else 1.5,
        "levers": ["2 regions"] if condition == "exact" else [],
        "peak_bytes": peak_bytes,
        "jittor": "1.3",
    }


def cases() -> list[dict[str, Any]]:
    plain = [case("plain", seed, 0.9 + 0.01 * seed, f"{seed}", 4 * MIB) for seed in range(3)]
    exact = [case("exact", seed, 0.9 + 0.01 * seed, f"{seed}") for seed in (2, 1, 0)]
    lean = [case("lean", seed, 0.9 + 0.01 * seed, "other" if seed else "0") for seed in range(3)]
    worse = [case("microbatches", seed, 0.8 + 0.01 * seed, "") for seed in range(3)]
    half = [case("16-mixed", seed, 0.9 + 0.1 * seed, "") for seed in range(3)]
    strict = [
        case(f"{condition}, strict", seed, 0.5, f"{seed}") for condition in ("plain", "exact") for seed in range(3)
    ]
    return [*plain, *exact, *lean, *worse, *half, *strict]


def test_verdicts_are_paired_by_seed() -> None:
    found = {said["condition"]: said for said in verdicts(cases())}
    assert [(c, said["verdict"], said["bitwise"]) for c, said in found.items()] == [
        ("exact", "equivalent", 3),
        ("lean", "equivalent", 1),
        ("microbatches", "refuted", 0),
        ("16-mixed", "undecided", 0),
        ("exact, strict", "equivalent", 3),
    ]
    assert found["microbatches"]["mean"] == pytest.approx(-0.1) and found["exact"]["margin"] == MARGIN


def test_tables_say_what_was_measured() -> None:
    runs = [
        {"way": w, "seed": s, "steps": 8 - s, "metric": m + s / 10}
        for w, m in (("plain", 0.5), ("planned", 0.6))
        for s in (0, 1)
    ]
    use = {
        "larger": {},
        "seconds": 3.0,
        "budget_bytes": MIB,
        "unplanned_bytes": 2 * MIB,
        "levers": ["2 regions"],
        "runs": runs,
    }
    used = [{"kind": "use", "use": "more", **judged(use)}]
    used.append(
        {"kind": "use", "use": "most", **judged({k: v for k, v in use.items() if k != "runs"} | {"infeasible": "no"})}
    )
    measured = [*cases(), *used]
    measured += verdicts(measured)
    summary = summary_of(measured)
    assert summary["bitwise"] == {"exact": 3, "lean": 1, "microbatches": 0, "16-mixed": 0, "exact, strict": 3}
    assert (summary["equivalent"], summary["refuted"], summary["undecided"]) == (3, 1, 1)
    assert (summary["uses"], summary["uses_that_pay"]) == (2, 1)
    machine = {"description": "this", "threads": 1}
    result = {"cases": measured, "summary": summary, "command": "it", "machine": machine, "versions": {"torch": "2"}}
    result["date"] = "today"
    rows = verdicts_table(result)
    assert "| plain, fp32 | 0.910 ± 0.010 |  |  |  | 4.0 MiB | 1.0 s |" in rows
    assert "2 regions | 0.910 ± 0.010 | +0.000 ± 0.000 | equal bits |  | ×0.50 | ×1.50 |" in rows
    assert "**refuted** (worse)" in rows and "0 to 2 of 10" in rows and "Jittor 1.3." in rows
    rows = uses_table(result)
    assert "| more | 1.0 MiB | 2.0 MiB | 2 regions | 8, 8 | 0.550 ± 0.071 | 0.650 ± 0.071 | yes |" in rows
    assert "| most | 1.0 MiB | 2.0 MiB | no plan fits |  |  |  | no |" in rows


def test_the_page_has_the_figures_of_the_result() -> None:
    result, words = results("parity_jittor"), words_of(DOCS / "results" / "parity-in-jittor.md")
    summary = result["summary"]
    assert "--quick" not in result["command"] and summary_of(result["cases"]) == summary
    assert [c for c in result["cases"] if c["kind"] == "verdict"] == verdicts(result["cases"])
    assert summary["seeds"] >= 5 and summary["uses"] == len(USES)
    plain = [c["metric"] for c in result["cases"] if c["kind"] == "run" and c["condition"] == "plain"]
    assert min(plain) > 0.9
    seeds, bitwise = summary["seeds"], summary["bitwise"]
    assert bitwise["lean"] == bitwise["exact, strict"] == seeds
    assert f"{bitwise['lean']} of {seeds} and {bitwise['exact, strict']} of {seeds} runs" in words
    assert f"{bitwise['exact']} of {seeds} runs" in words
    said = f"{summary['equivalent']} equivalent, {summary['refuted']} refuted, {summary['undecided']} undecided"
    assert f"The verdicts in Jittor: {said}" in words

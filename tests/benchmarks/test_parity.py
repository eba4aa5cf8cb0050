"""The equivalence test can say no, the summary counts what there is, and a tiny training runs to its end."""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pages import stale
from benchmarks.parity import text, uses
from benchmarks.parity.__main__ import run, verdicts
from benchmarks.parity.conditions import CONDITIONS
from benchmarks.parity.equivalence import compare
from benchmarks.parity.figures import summary_of, verdict_text
from benchmarks.parity.half import HalfProducts
from benchmarks.parity.page import files
from benchmarks.parity.runs import run as run_once
from benchmarks.parity.text import PACKAGES, sources
from benchmarks.parity.trainings import TRAININGS
from benchmarks.tables import results
from memfit.errors import WorkloadError
from tests.docs.pages import DOCS, words_of

has_texts = pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES), reason="this Python lacks packages that the texts are from"
)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, -0.002, 0.0, 0.001, -0.001], "equivalent"),
        ([-0.05, -0.06, -0.05, -0.055, -0.052], "refuted"),  # worse
        ([0.05, 0.06, 0.05, 0.055, 0.052], "refuted"),  # better is another training too
        ([0.03, -0.03, 0.01, -0.02, 0.02], "undecided"),
        ([0.0] * 5, "equivalent"),
        ([-0.5] * 5, "refuted"),
        ([0.0, 0.0, math.nan, 0.0, 0.0], "refuted"),  # it did not survive one seed
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    assert compare(differences, margin=0.02).verdict == verdict


def test_the_margin_decides() -> None:
    differences = [-0.011, -0.009, -0.010, -0.012, -0.008]
    assert compare(differences, margin=0.02).verdict == "equivalent"
    assert compare(differences, margin=0.005).verdict == "refuted"


def test_undecided_says_how_many_seeds_would_do() -> None:
    said = compare([0.03, -0.03, 0.01, -0.02, 0.02], margin=0.02)
    assert said.seeds_needed is not None and said.seeds_needed > 5
    spread = [0.03, -0.03, 0.01, -0.02, 0.02] * (said.seeds_needed // 5 + 1)
    assert compare(spread, margin=0.02).verdict == "equivalent"
    assert compare([0.03, 0.01, 0.02, 0.025, 0.015], margin=0.02).seeds_needed is None  # right on the margin


@pytest.mark.ci
def test_a_wrong_verdict_is_rare_where_the_truth_is_the_margin() -> None:
    """At the margin, "equivalent" may be said in 5 % of cases, and so may "refuted"."""
    generator = torch.Generator().manual_seed(0)
    said = [compare((1 + 0.5 * torch.randn(5, generator=generator)).tolist(), margin=1.0).verdict for _ in range(200)]
    assert 0.01 < said.count("equivalent") / len(said) < 0.1
    assert 0.01 < said.count("refuted") / len(said) < 0.1


def case(condition: str, seed: int, metric: float, weights: str = "a", training: str = "video") -> dict[str, Any]:
    return {
        "kind": "run",
        "training": training,
        "condition": condition,
        "seed": seed,
        "metric": metric,
        "weights": weights,
    }


def test_verdicts_are_paired_by_seed_and_weights_are_compared() -> None:
    plain = [case("plain", seed, 0.5 + 0.1 * seed, f"{seed}") for seed in range(4)]
    exact = [case("exact", seed, 0.5 + 0.1 * seed, f"{seed}" if seed else "other") for seed in (3, 2, 1, 0)]
    worse = [case("adafactor", seed, 0.3 + 0.1 * seed) for seed in range(4)]
    same, refuted = verdicts("video", [*plain, *exact, *worse])
    assert (same["verdict"], same["bitwise"]) == ("equivalent", 3)
    assert verdict_text(same) == "equivalent"  # not "equal bits"
    assert verdict_text({**same, "bitwise": 4}) == "equal bits"
    assert refuted["verdict"] == "refuted" and refuted["mean"] == pytest.approx(-0.2)
    assert verdict_text(refuted) == "**refuted** (worse)"


def test_less_is_better_where_a_training_says_so() -> None:
    plain = [case("plain", seed, 3.0, training="byte_lm") for seed in range(3)]
    (said,) = verdicts("byte_lm", [*plain, *(case("bf16-mixed", s, 3.5, training="byte_lm") for s in range(3))])
    assert said["mean"] == pytest.approx(-0.5) and verdict_text(said) == "**refuted** (worse)"


def test_summary_leaves_out_what_is_there_since_it_hurts() -> None:
    runs = [case(c, s, 0.5) for c in ("plain", "exact", "16-mixed-high") for s in range(2)]
    runs += [case("16-mixed-high", 2, 0.1), case("plain", 2, 0.5)]
    used = [{"kind": "use", "training": "video", "pays": True}, {"kind": "use", "training": "video", "pays": False}]
    summary = summary_of([*runs, *verdicts("video", runs), *used, {**used[1], "training": "byte_lm"}])
    assert summary == {
        "trainings": 1,
        "seeds": 3,
        "runs": 8,
        "exact_runs": 2,
        "exact_bitwise": 2,
        "equivalent": 1,
        "refuted": 0,
        "undecided": 0,
        "budget_use_pays": 1,
    }


# What runs


@has_texts
def test_texts_of_no_file_are_in_both_parts() -> None:
    training, validation = sources("training"), sources("validation")
    assert len(training) == len(validation) == len(PACKAGES)
    assert all(len(a) > len(b) > 10_000 for a, b in zip(training, validation, strict=True))


def test_a_python_without_one_of_the_packages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "source_files", lambda split: [Path(p, "a.py") for p in PACKAGES if p != "email"])
    sources.cache_clear()
    with pytest.raises(WorkloadError, match=r"no source files of email in .*PYTHON="):
        sources("training")


def test_products_in_fp16_are_those_of_the_cpu_and_are_written_down() -> None:
    layer, x = torch.nn.Linear(64, 32).half(), torch.randn(8, 64, dtype=torch.float16)
    half = HalfProducts()
    with half:
        found = layer(x)
        found.sum().backward()
    native = layer(x)
    assert found.dtype == native.dtype == torch.float16
    torch.testing.assert_close(found, native, rtol=2e-3, atol=2e-3)
    assert half.seen["addmm"] == {"fp16 in, fp32 inside"}
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float16


@pytest.mark.ci
@has_texts
def test_an_exact_run_ends_in_the_same_weights_and_another_one_does_not() -> None:
    training, plans = dataclasses.replace(TRAININGS["text_classifier"], steps=3), dict[str, Any]()
    plain, exact, other = (
        run_once(training, condition, 0, plans) for condition in ("plain", "exact", "bf16-stochastic")
    )
    assert exact["levers"] and exact["weights"] == plain["weights"] != other["weights"]
    assert exact["peak_bytes"] < plain["peak_bytes"]
    assert len(plain["losses"]) == 3 and plain["skips"] == 0


@pytest.mark.ci
@has_texts
def test_a_scale_that_is_too_high_skips_updates() -> None:
    training = dataclasses.replace(TRAININGS["text_classifier"], steps=4)
    found = run_once(training, "16-mixed-high", 0, {})
    assert found["skips"] == 4 and found["first_scale"] == 2.0**40 and found["last_scale"] == 2.0**37


@pytest.mark.ci
@has_texts
def test_a_run_goes_on_from_its_rows(tmp_path: Any) -> None:
    options: dict[str, Any] = {"trainings": ["text_classifier"], "rows": tmp_path / "rows"}
    cases, summary = run(True, conditions=["exact"], **options)
    assert summary["exact_runs"] == summary["exact_bitwise"] == 2
    again, _ = run(True, conditions=["exact"], **options)
    assert again == cases


@pytest.mark.ci
@has_texts
def test_a_use_stays_in_the_bytes_of_the_plain_step() -> None:
    use = uses.USES["batch of 128 in place of 32"]
    plan, plain_bytes, large_bytes = uses.plan_of(use)
    rows = uses.run(use, 0, plan, seconds=0.1)
    made = uses.case_of(use, plan, plain_bytes, large_bytes, rows)
    assert large_bytes > plan.budget_bytes >= rows[1]["peak_bytes"]
    assert made["pays"] == (rows[1]["metric"] >= rows[0]["metric"])


# The committed result


def test_the_page_has_the_figures_of_the_result() -> None:
    result, words = results("parity"), words_of(DOCS / "results" / "parity.md")
    summary = result["summary"]
    assert "--quick" not in result["command"] and stale(files(result)) == []
    assert summary["exact_bitwise"] == summary["exact_runs"] > 0
    assert summary["seeds"] >= 5 and summary["trainings"] >= 5
    assert summary_of(result["cases"]) == summary
    used = {case["training"] for case in result["cases"] if case["kind"] == "use"}
    said = [
        f"{summary['exact_bitwise']} of {summary['exact_runs']}",
        f"{summary['equivalent']} equivalent, {summary['refuted']} refuted, {summary['undecided']} undecided",
        f"pays in {summary['budget_use_pays']} of {len(used)}",
    ]
    assert [one for one in said if one not in words] == []
    levers = sum(summary[verdict] for verdict in ("equivalent", "refuted", "undecided"))
    index = f"{said[0]} exact runs end in the same bits; of {levers} verdicts, {said[1]}"
    assert index in words_of(DOCS / "results" / "all.md")
    names = dict.fromkeys(c["training"] for c in result["cases"] if c["kind"] == "run")
    assert result["cases"][-len(names) * (len(CONDITIONS) - 1) :] == [
        verdict for name in names for verdict in verdicts(name, result["cases"])
    ]

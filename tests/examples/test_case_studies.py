"""The case studies run, what they say is measured, and their pages are made from their results."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import case_studies
from benchmarks.tables import newest, results
from memfit.errors import MissingExtraError

EXAMPLES = Path(__file__).parents[2] / "examples"


def check_cases(cases: list[dict[str, Any]], budget_bytes: int) -> None:
    """Check that the first case is over the budget, and that all others were trained within it, as predicted."""
    unfit, *trained = cases
    assert unfit["measured_peak_bytes"] > budget_bytes and "curve" not in unfit
    for case in trained:
        assert case["measured_peak_bytes"] <= budget_bytes
        assert case["measured_peak_bytes"] == pytest.approx(case["predicted_peak_bytes"], rel=0.01)
        assert case["curve"][-1]["steps"] == case["steps"] and case["cpu_seconds"] > 0


def check_language_model(cases: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    check_cases(cases, summary["budget_bytes"])
    _, plain, planned = cases
    assert plain["context"] < planned["context"] == summary["context"]
    equal = plain["curve"][summary["evaluations"] - 1]
    assert equal["steps"] * plain["context"] == planned["steps"] * planned["context"]
    assert plain["cpu_seconds"] >= planned["cpu_seconds"] or equal is plain["curve"][-1]
    assert summary["bits_per_byte_equal_bytes"] == equal["bits_per_byte"]


def check_brain_segmentation(cases: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    check_cases(cases, summary["budget_bytes"])
    unfit, plain, planned, structured = cases
    assert unfit["patch"] == planned["patch"] == structured["patch"] == list(summary["patches"][0])
    for case in (plain, planned, structured):
        x, y, z = case["patch"]
        seen = case["steps"] * summary["batch_size"] * x * y * z
        assert seen == pytest.approx(summary["voxels"], abs=summary["batch_size"] * x * y * z)
    assert structured["parameters"] < planned["parameters"] == plain["parameters"]
    assert 0 < summary["multiply_adds_ratio_structured"] < 1
    assert not plain["levers"] and planned["levers"] and structured["levers"]


@pytest.mark.ci
def test_language_model_runs() -> None:
    from examples.language_model.__main__ import run

    check_language_model(*run(quick=True))


@pytest.mark.ci  # `make test` has the language model, and the recipe of the segmentation
def test_brain_segmentation_runs_and_draws(tmp_path: Path) -> None:
    for package in ("monai", "nilearn", "matplotlib"):
        pytest.importorskip(package)
    from examples.brain_segmentation.__main__ import run

    picture = tmp_path / "picture.png"
    cases, summary = run(quick=True, picture=picture)
    check_brain_segmentation(cases, summary)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert summary["picture_sha256"] == hashlib.sha256(picture.read_bytes()).hexdigest()


def test_a_picture_without_matplotlib_names_the_extra_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from examples.brain_segmentation import __main__ as example

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(example, "train", None)
    with pytest.raises(MissingExtraError, match=r"'matplotlib'.*pip install 'memfit\[examples\]'"):
        example.run(quick=True, picture=tmp_path / "picture.png")


def test_short_contexts_are_held_against_the_same_bytes_as_long_ones() -> None:
    import torch

    from examples.language_model.__main__ import evaluate

    class Bigrams(torch.nn.Module):
        """A model that looks at one byte only, so that its context makes no difference."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(tokens, 256).float() * 3

    tokens = torch.randint(256, (3, 65), generator=torch.Generator().manual_seed(0))
    windows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    whole = evaluate(Bigrams(), windows=windows, context=64)
    assert evaluate(Bigrams(), windows=windows, context=16) == pytest.approx(whole)
    for part, own in ((slice(48, None), "last"), (slice(16), "first")):
        found = evaluate(Bigrams(), windows={k: v[:, part] for k, v in windows.items()}, context=16)
        assert found["bits_per_byte"] == pytest.approx(whole[f"bits_per_byte_{own}_quarter"])
    assert whole["bits_per_byte_last_quarter"] != pytest.approx(whole["bits_per_byte_first_quarter"])


@pytest.mark.parametrize(
    ("name", "check"), [("language_model", check_language_model), ("brain_segmentation", check_brain_segmentation)]
)
def test_committed_result_is_a_full_run_and_its_page_shows_it(name: str, check: Any) -> None:
    result = json.loads(newest(name).read_text())
    check(result["cases"], result["summary"])
    assert "--quick" not in result["command"]
    table = getattr(case_studies, f"{name}_table")(results(name))
    page = (EXAMPLES / name / "README.md").read_text()
    assert f"-->\n{table}\n<!-- /{name} -->" in page
    if name == "brain_segmentation":
        picture = (EXAMPLES / name / "segmentation.png").read_bytes()
        assert result["summary"]["picture_sha256"] == hashlib.sha256(picture).hexdigest() and len(picture) < 200_000


def test_page_says_who_wins() -> None:
    result = results("language_model")
    long = result["summary"]["bits_per_byte_planned"]
    for lead, says in (
        (-0.5, "does not win in so short a run"),
        (0.5, "at as many bytes by 0.500 bits per byte (the long"),
    ):
        figures = {f"bits_per_byte_equal_{what}": long + lead for what in ("bytes", "seconds")}
        page = case_studies.language_model_table({**result, "summary": result["summary"] | figures})
        assert says in page


# The compressed digits ResNet


def test_half_the_multiply_adds_are_as_accurate() -> None:
    result = results("compress")
    plain, *smaller = result["cases"]
    assert plain["model"] == "original" and len(smaller) == 4
    for case in smaller:
        assert case["multiply_adds"] <= plain["multiply_adds"] / 2
        assert case["start_accuracy"] > case["random_accuracy"] + 0.2
        assert case["accuracy"] >= plain["accuracy"] - 0.01


def test_predicted_savings_are_the_measured_ones() -> None:
    plain, *smaller = results("compress")["cases"]
    for case in smaller:
        predicted, real = (plain[key] - case[key] for key in ("predicted_peak_bytes", "measured_peak_bytes"))
        assert abs(predicted / real - 1) < 0.05
        assert case["measured_peak_bytes"] <= case["peak_upper_bytes"]

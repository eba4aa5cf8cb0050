"""What the compressed digits ResNet's result file says holds."""

from __future__ import annotations

from benchmarks.tables import results


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

"""The figures of ratios between plans, and the processes that make a machine busy."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from benchmarks import step_times


def ratio(predicted: float, measured: float) -> dict[str, Any]:
    return {"kind": "ratio", "predicted_ratio": predicted, "measured_ratio": measured}


def test_errors_are_of_the_ratio_and_choices_of_the_fastest() -> None:
    rows = [
        ratio(1.0, 1.0),
        ratio(0.96, 1.2),
        ratio(1.26, 1.2),
        *({"kind": "choice", "ratio_to_best": r} for r in (1, 1.02, 1.1)),
    ]
    assert step_times.summary_of(rows) == {
        "cells": 3,
        "ratio_median_abs_error": pytest.approx(0.05),
        "ratio_within_10_percent": pytest.approx(2 / 3),
        "choices": 3,
        "measured_choice_within_2_percent": pytest.approx(2 / 3),
    }


def test_nothing_measured_is_no_figure() -> None:
    assert step_times.summary_of([])["ratio_median_abs_error"] is None


def test_the_error_of_a_median_is_that_of_many_medians() -> None:
    draws = random.Random(0)
    samples = [[draws.gauss(1.0, 0.1) for _ in range(25)] for _ in range(2000)]
    spread = statistics.pstdev(statistics.median(sample) for sample in samples)
    found = statistics.fmean(step_times.error_of_median(sample) for sample in samples)
    assert found == pytest.approx(spread, rel=0.1) and step_times.error_of_median([1.0] * 4) == 0.0


def test_others_compute_until_the_cells_are_done() -> None:
    with step_times._computing(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode for process in processes)

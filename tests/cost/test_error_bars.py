"""Error bars: their coverage, and the calibration that comes with the package."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.calibration import upper_error
from memfit.cost.cpu_costs import calibrate
from memfit.cost.error_bars import calibration
from memfit.ir.simulate import simulate
from memfit.ir.trace import Work
from tests.models import plain_trace

SCORES = st.lists(st.floats(-0.5, 0.5), min_size=60, max_size=200)
RATES = st.floats(0.5, 0.98)


@given(SCORES, RATES)
def test_at_least_the_stated_share_of_the_scores_is_within(scores: list[float], rate: float) -> None:
    bar = upper_error(scores, rate)
    assert bar >= 0
    assert sum(s <= bar for s in scores) >= rate * (len(scores) + 1) - 1e-6


@given(SCORES, RATES)
def test_the_bar_is_the_lowest_that_does_it(scores: list[float], rate: float) -> None:
    bar = upper_error(scores, rate)
    assert bar == 0 or sum(s < bar for s in scores) < math.ceil(rate * (len(scores) + 1) - 1e-9)


def test_a_new_score_is_within_at_the_stated_rate() -> None:
    """Over many draws of scores and of one more: the theorem's bound, and not much above it."""
    draw = random.Random(0)
    rate, tries = 0.9, 4000
    inside = 0
    for _ in range(tries):
        scores = [draw.expovariate(1.0) for _ in range(59)]
        inside += draw.expovariate(1.0) <= upper_error(scores, rate)
    assert rate - 0.015 < inside / tries < rate + 1 / 60 + 0.015


@pytest.mark.parametrize(("rate", "enough"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.98, 49)])
def test_too_few_scores_are_refused_with_their_number(rate: float, enough: int) -> None:
    assert upper_error([0.1] * enough, rate) == 0.1
    with pytest.raises(ValueError, match=f"{enough - 1} scores are too few"):
        upper_error([0.1] * (enough - 1), rate)


def test_the_package_has_a_calibration_with_its_provenance_and_an_honest_coverage() -> None:
    found = calibration()
    assert found.source.startswith("benchmarks/results/prediction-") and found.cases >= 4 * 24
    assert 0 <= found.peak_error < found.unmeasured_peak_error
    assert found.coverage >= found.rate - 0.02 and found.unmeasured_coverage >= found.rate - 0.04


def test_the_bar_is_wider_by_the_share_of_an_operator_that_could_not_be_run() -> None:
    trace = plain_trace("twice")
    known = calibrate([trace])
    assert known.peak_error == calibration().peak_error
    peak = simulate(trace, known).peak_bytes
    strange = trace.signatures[:-1] + ['{"op":"aten.no_such_operator.default","args":[]}']

    def bar(nbytes: int) -> float:
        works = [*trace.works[:-1], Work(0, nbytes, 0, "float32", True)]
        return calibrate([replace(trace, signatures=strange, works=works)]).peak_error

    assert bar(0) == pytest.approx(known.peak_error)
    assert known.peak_error < bar(peak) <= calibration().unmeasured_peak_error
    assert bar(100 * peak) == calibration().unmeasured_peak_error

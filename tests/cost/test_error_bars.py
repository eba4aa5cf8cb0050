"""Error bars: their coverage, the calibration of the package, and what was measured on cards."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.calibration import measured_card, upper_error
from memfit import ir
from memfit.cost import (
    STEP_ERROR,
    AcceleratorCosts,
    CardMeasurement,
    accelerator_cache,
    calibrate,
    calibration,
    card_measurements,
    key_of,
    measured_costs,
    measured_like,
    roofline,
)
from memfit.hardware import known_devices
from memfit.ir import CostTable, Work, operator_class, simulate
from memfit.planner import predict
from tests.benchmarks.cards import CORRECTIONS, PREDICTIONS
from tests.models import plain_trace

SCORES = st.lists(st.floats(-0.5, 0.5), min_size=60, max_size=200)
RATES = st.floats(0.5, 0.98)


@given(SCORES, RATES)
def test_the_bar_is_the_lowest_within_which_is_the_stated_share_of_the_scores(scores: list[float], rate: float) -> None:
    bar = upper_error(scores, rate)
    assert bar >= 0
    assert sum(s <= bar for s in scores) >= rate * (len(scores) + 1) - 1e-6
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


MEASURED = measured_card(PREDICTIONS, CORRECTIONS, ["a", "b"])
H100 = next(device for device in known_devices().values() if device.capability == (9, 0))


@pytest.fixture
def known() -> Iterator[dict[str, CardMeasurement]]:
    """The package's measurements, which a test adds to."""
    cards = card_measurements().cards
    before = dict(cards)
    cards.clear()
    yield cards
    cards.clear()
    cards.update(before)


def test_the_package_has_a_file_of_them() -> None:
    for key, card in card_measurements().cards.items():
        assert key and card.sources and card.cases


def test_a_measurement_holds_for_the_family(known: dict[str, CardMeasurement]) -> None:
    known[key_of(H100, probed=False)] = MEASURED
    assert list(known) == ["nvidia-9.0"]
    family = [device for device in known_devices().values() if measured_like(device)]
    assert len(family) > 1 and {device.capability for device in family} == {(9, 0)}


def test_what_is_relative_to_a_probe_holds_for_its_product(known: dict[str, CardMeasurement]) -> None:
    own = replace(H100, description="NVIDIA Of Mine", products=("NVIDIA Of Mine",))
    known[key_of(own, probed=True)] = MEASURED
    assert measured_like(own) == MEASURED and measured_like(H100) is None


def test_devices_without_a_capability_are_known_by_their_product(known: dict[str, CardMeasurement]) -> None:
    mi = known_devices()["mi300x"]
    known[key_of(mi, probed=False)] = MEASURED
    assert measured_like(mi) == MEASURED and measured_like(known_devices()["mi250x"]) is None


def measured_table(name: str) -> CostTable:
    """Return costs of a card that were measured before."""
    trace, device = plain_trace(name), replace(H100, name="cuda:0")
    ops = dict.fromkeys(trace.signatures, (1e-6, 0))
    known = AcceleratorCosts(launch_seconds=1e-6, link_bytes_per_second=1e9, ops=ops)
    ir.codec.write_atomic(accelerator_cache(device, "highest"), ir.codec.encode(known))
    return measured_costs([trace], device)


def test_error_bars_are_those_of_the_reserved_bytes_and_times() -> None:
    assert MEASURED.peak_error == pytest.approx(0.02) and MEASURED.step_error == pytest.approx(1 / 0.9 - 1)
    assert (MEASURED.cases, MEASURED.workloads, MEASURED.coverage) == (120, 60, 1.0)
    assert MEASURED.time_factors == {"matrix products": {"bfloat16": 1.5}}


def test_too_few_steps_leave_the_estimates_in_use(known: dict[str, CardMeasurement]) -> None:
    few = measured_card({**PREDICTIONS, "cases": PREDICTIONS["cases"][:20]}, CORRECTIONS, [])
    assert (few.peak_error, few.step_error, few.cases) == (None, None, 20)
    known["nvidia-9.0"] = few
    table = measured_table("twice")
    assert (table.peak_error, table.step_error, table.notes) == (0.05, 0.2, [])


def test_predictions_for_a_card_like_it_take_the_bars_and_say_so(known: dict[str, CardMeasurement]) -> None:
    assert measured_table("convnet").peak_error == 0.10
    known["nvidia-9.0"] = MEASURED
    table = measured_table("convnet")
    assert (table.peak_error, table.step_error) == (MEASURED.peak_error, MEASURED.step_error)
    assert table.notes == ["error bars are those of 120 steps on A card (2026-01-01)"]


def test_modelled_times_elsewhere_are_corrected_by_class_and_dtype_and_say_so(
    known: dict[str, CardMeasurement],
) -> None:
    trace, device = plain_trace("transformer"), replace(H100, launch_seconds=1e-12)
    plain = roofline([trace], device)
    names = {trace.signatures[op.signature]: (operator_class(op.name), trace.works[op.signature]) for op in trace.ops}
    kind = ("matrix products", next(work.dtype for name, work in names.values() if name == "matrix products"))
    known["nvidia-9.0"] = replace(MEASURED, time_factors={kind[0]: {kind[1]: 1.5}})
    corrected = roofline([trace], device)
    for text, cost in plain.ops.items():
        name, work = names[text]
        factor = 1.5 if (name, work.dtype) == kind else 1.0
        assert corrected.of(text).seconds == pytest.approx(factor * cost.seconds)
    assert corrected.step_error == plain.step_error == STEP_ERROR
    note = "times are modelled, and corrected by measured steps on A card (2026-01-01)"
    assert (
        plain.notes == []
        and note in predict(trace, corrected, replace(device, usable_bytes=device.memory_bytes))[0].notes
    )

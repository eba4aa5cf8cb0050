"""The line that every answer begins with, for every kind of plan, device and measurement."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memfit.foundations import read_budget
from memfit.ir import (
    NUMERICS,
    OTHER_DRAWS,
    Comparison,
    Levers,
    LeverUse,
    MeasuredStep,
    Numerics,
    Plan,
    Prediction,
    Sharding,
)
from memfit.report import (
    enough_text,
    infeasible_verdict,
    of_text,
    plan_verdict,
    prediction_verdict,
    verification_verdict,
)
from memfit.report.summary import comparison_verdict, speed_text
from tests.report.conftest import GIB, MIB, VERIFIED

KIB = 1024


def step(peak_bytes: int, seconds: float = 1.0, upper_bytes: int | None = None, **more: Any) -> Prediction:
    return Prediction(
        peak_bytes=peak_bytes,
        peak_upper_bytes=upper_bytes or peak_bytes,
        step_seconds=seconds,
        by_category={},
        where="",
        **more,
    )


def use(name: str, numerics: Numerics) -> LeverUse:
    return LeverUse(name=name, setting=name, brief=name, numerics=numerics)


def planned(base: Plan, predicted: Prediction, *uses: LeverUse, **more: Any) -> Plan:
    """Return a plan for 100 MiB whose plain step takes a second."""
    numerics = max((each.numerics for each in uses), default="exact", key=NUMERICS.index)
    given = {"levers": Levers(microbatch_size=16), "budget_bytes": 100 * MIB, "plain": step(133 * MIB)} | more
    return replace(base, predicted=predicted, uses=uses, numerics=numerics, **given)


EXACT = use("activation checkpointing", "exact")
REORDERED, REDUCED, CHANGED = use("microbatches", "reordered"), use("precision", "reduced"), use("adafactor", "changed")
BF16 = {"levers": Levers(microbatch_size=16, precision="bf16-mixed")}


SHARED = {"levers": Levers(microbatch_size=4, sharding=Sharding(world_size=4, mode="zero3"))}
DRAWS = {"notes": [f"{OTHER_DRAWS}microbatches differ"]}
EIGHT_BIT = use("AdamW with 8-bit states", "reduced")


@pytest.mark.parametrize(
    ("predicted", "used", "more", "verdict"),
    [
        (step(99 * MIB, 1.04), EXACT, {}, "Fits: 99 of 100 MiB, 4 % slower, bit-identical."),
        (step(99 * MIB, 0.97), REORDERED, {}, "Fits: 99 of 100 MiB, 3 % faster, equal to rounding."),
        (step(99 * MIB), REORDERED, DRAWS, "Fits: 99 of 100 MiB, as fast, equal to rounding but for dropout masks."),
        (step(99 * MIB, 1.001), REORDERED, {}, "Fits: 99 of 100 MiB, as fast, equal to rounding."),
        (step(99 * MIB, 2.5), EXACT, {}, "Fits: 99 of 100 MiB, 2.5 times as long, bit-identical."),
        (step(50 * MIB, 0.4), REDUCED, BF16, "Fits: 50 of 100 MiB, 2.5 times as fast, fewer bits: bfloat16."),
        (step(50 * MIB), EIGHT_BIT, {}, "Fits: 50 of 100 MiB, as fast, fewer bits: AdamW with 8-bit states."),
        (step(50 * MIB), CHANGED, {}, "Fits: 50 of 100 MiB, as fast, another training: adafactor."),
        (step(99 * MIB, 0.0), EXACT, {}, "Fits: 99 of 100 MiB, bit-identical."),
        (step(500 * KIB), EXACT, {}, "Fits: 500 KiB of 100 MiB, as fast, bit-identical."),
        (step(98 * MIB, 1, 104 * MIB), EXACT, {}, "May not fit: needs up to 104 of 100 MiB, as fast, bit-identical."),
        (step(133 * MIB), EXACT, {}, "Does not fit: needs 133 of 100 MiB, as fast, bit-identical."),
        (
            step(90 * MIB, 1.04, 97 * MIB, peak_reserved_bytes=95 * MIB),
            EXACT,
            {},
            "Fits: 97 of 100 MiB reserved (90.0 MiB allocated), 4 % slower, bit-identical.",
        ),
        (step(50 * MIB), REORDERED, SHARED, "Fits: 50 of 100 MiB on each of 4 ranks, as fast, equal to rounding."),
    ],
)
def test_a_plans_verdict(plan: Plan, predicted: Prediction, used: LeverUse, more: dict[str, Any], verdict: str) -> None:
    uses = [REORDERED, used] if used is EIGHT_BIT else [used]
    assert plan_verdict(planned(plan, predicted, *uses, **more)) == verdict


def test_times_that_were_measured_before_the_choice_count_where_the_plain_step_was_run_too(plan: Plan) -> None:
    ours, plain = Levers(microbatch_size=4), Levers(microbatch_size=16)
    own = MeasuredStep(levers=ours, uses=(REORDERED,), predicted_seconds=1.04, measured_seconds=3.0, steps=3)
    other = MeasuredStep(levers=plain, uses=(), predicted_seconds=1.0, measured_seconds=2.5, steps=3)
    chosen = planned(plan, step(99 * MIB, 1.04), REORDERED, levers=ours, measured=(own,))
    assert "4 % slower" in plan_verdict(chosen)
    assert "20 % slower" in plan_verdict(replace(chosen, measured=(own, other)))


MEASURED = Comparison(
    plain_peak_bytes=133 * MIB,
    planned_peak_bytes=98 * MIB,
    plain_step_seconds=1.0,
    planned_step_seconds=1.1,
    plain_losses=[2.0, 1.5],
    planned_losses=[2.0, 1.5],
)


def test_what_was_measured_is_told_in_place_of_what_is_predicted(plan: Plan) -> None:
    chosen = planned(plan, step(99 * MIB, 1.04), EXACT)
    assert plan_verdict(chosen, MEASURED) == "Fits: measured 98 of 100 MiB, 10 % slower, bit-identical."
    apart = replace(MEASURED, planned_losses=[2.0, 1.6])
    assert plan_verdict(chosen, apart) == "Fits: measured 98 of 100 MiB, 10 % slower, losses not identical."
    larger = replace(MEASURED, planned_peak_bytes=101 * MIB)
    assert plan_verdict(chosen, larger) == "Does not fit: measured 101 of 100 MiB, 10 % slower, bit-identical."


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([2.0, 1.5], "losses bit-identical"),
        ([2.0, 1.50001], "losses at most 1.0e-05 apart"),
        ([2.0, float("nan")], "a loss is not finite"),
        ([], "losses not compared"),
    ],
)
def test_a_comparisons_verdict(losses: list[float], words: str) -> None:
    found = replace(MEASURED, planned_losses=losses)
    assert comparison_verdict(found) == f"Measured: 98 MiB in place of 133 MiB, 10 % slower, {words}."


@pytest.mark.parametrize(
    ("mib", "upper", "reserved", "device", "verdict"),
    [
        (133, 138, None, None, "Needs 133 MiB, at most 138 MiB."),
        (133, 133, None, None, "Needs 133 MiB."),
        (133, 133, None, 20_480, "Fits: needs 133 MiB of 20 GiB."),
        (133, 138, None, 1024, "Fits: needs 133 MiB, at most 138 MiB of 1 GiB."),
        (20_480, 23_552, 22_528, 24_576, "Fits: needs 22 GiB reserved, at most 23 of 24 GiB."),
        (20_480, 25_600, 22_528, 24_576, "May not fit: needs 22 GiB reserved, up to 25 of 24 GiB."),
        (30_720, 35_840, 32_768, 24_576, "Does not fit: needs 32 of 24 GiB reserved."),
    ],
)
def test_an_estimates_verdict(mib: int, upper: int, reserved: int | None, device: int | None, verdict: str) -> None:
    more = {"peak_reserved_bytes": reserved and reserved * MIB, "device_bytes": device and device * MIB}
    assert prediction_verdict(step(mib * MIB, 1.0, upper * MIB, **more)) == verdict


@pytest.mark.parametrize(
    ("smallest_bytes", "plain_bytes", "is_proven", "verdict"),
    [
        (806 * KIB, 133 * MIB, True, "Does not fit: needs 133 MiB of 500 KiB. Smallest budget that works: 806 KiB"),
        (806 * KIB, None, False, "Does not fit: needs 806 of 500 KiB. Smallest budget found that works: 806 KiB"),
    ],
)
def test_the_verdict_of_a_budget_that_nothing_fits(
    smallest_bytes: int, plain_bytes: int | None, is_proven: bool, verdict: str
) -> None:
    assert infeasible_verdict(500 * KIB, smallest_bytes, plain_bytes=plain_bytes, is_proven=is_proven) == verdict


@pytest.mark.parametrize("nbytes", [1, 1023, 1025, 805_901, 10 * MIB + 1, 1_494_240, 123 * GIB + 7])
def test_a_budget_that_is_named_is_no_less_than_what_is_needed(nbytes: int) -> None:
    assert nbytes <= read_budget(enough_text(nbytes)).nbytes() <= 1.01 * nbytes + 1


def apart(numerics: Numerics, difference: float) -> dict[str, Any]:
    return {"numerics": numerics, "bitwise": False, "gradient_difference": difference}


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, "Verified: measured 98 of 100 MiB, bit-identical."),
        (apart("reordered", 3e-7), "Verified: measured 98 of 100 MiB, equal to rounding (gradients 3e-07 apart)."),
        (apart("reduced", 0.01), "Verified: measured 98 of 100 MiB, fewer bits (gradients 1e-02 apart)."),
        ({"measured_reserved_bytes": 99 * MIB}, "Verified: measured 99 of 100 MiB, bit-identical."),
        ({"rank_peaks_bytes": [MIB, 98 * MIB]}, "Verified: measured 98 of 100 MiB on each of 2 ranks, bit-identical."),
        ({"failures": ["measured peak is high"]}, "Verification failed: measured peak is high."),
        ({"failures": ["one", "two", "three"]}, "Verification failed: one (and 2 more)."),
    ],
)
def test_a_verifications_verdict(more: dict[str, Any], verdict: str) -> None:
    assert verification_verdict(replace(VERIFIED, **more)) == verdict


def test_what_is_over_never_looks_as_if_it_fitted() -> None:
    assert of_text(100 * MIB + 1, 100 * MIB) == "104,857,601 of 104,857,600 bytes"
    assert of_text(100 * MIB - 1, 100 * MIB) == "100 of 100 MiB"


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_no_speed_is_told_where_a_time_is_not_known(seconds: tuple[float, float]) -> None:
    assert speed_text(*seconds) == ""

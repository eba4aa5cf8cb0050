"""Contenders fit and are near by the error of predictions; of those that ran, the likely fastest one is taken."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir.plan import NUMERICS, Candidate, Levers, LeverUse, Numerics, Prediction, allows
from memfit.planner.search import (
    MARGIN,
    MOST,
    RATIO_ERROR,
    Confirmed,
    Limits,
    MeasuredPlan,
    fastest_measured,
    near_ties,
    weighed,
)
from memfit.solver.frontier import Combination
from tests.planner.test_search import Applied, chosen, combinations, limits, plain_bytes

seconds = st.floats(1e-4, 1e3)
records = st.builds(MeasuredPlan, seconds, seconds, st.sampled_from(NUMERICS), st.integers(0, 4))
several = st.lists(records, min_size=1, max_size=6)
near_each_other = st.lists(
    st.builds(MeasuredPlan, st.floats(1.0, 1.01), seconds, st.sampled_from(NUMERICS), st.integers(0, 4)),
    min_size=2,
    max_size=6,
)


@given(several | near_each_other)
def test_what_is_taken_is_within_the_margin_of_the_fastest(measured: list[MeasuredPlan]) -> None:
    taken = measured[fastest_measured(measured)]
    assert taken.measured_seconds <= (1 + MARGIN) * min(one.measured_seconds for one in measured)


@given(near_each_other)
def test_of_plans_about_as_fast_none_is_stricter_or_as_strict_with_fewer_levers(measured: list[MeasuredPlan]) -> None:
    index = fastest_measured(measured)
    least = min(one.measured_seconds for one in measured)
    near = [one for one in measured if one.measured_seconds <= (1 + MARGIN) * least]

    def freeness(one: MeasuredPlan) -> tuple[int, int]:
        return NUMERICS.index(one.numerics), one.levers

    assert freeness(measured[index]) == min(map(freeness, near))
    alike = [one for one in near if freeness(one) == freeness(measured[index])]
    assert measured[index].measured_seconds == min(one.measured_seconds for one in alike)


@given(near_each_other, st.integers(-6, 6), st.randoms(use_true_random=False))
def test_neither_the_unit_nor_the_order_of_the_others_matters(
    measured: list[MeasuredPlan], power: int, draws: random.Random
) -> None:
    taken = measured[fastest_measured(measured)]
    scaled = [one._replace(measured_seconds=2.0**power * one.measured_seconds) for one in measured]
    assert measured[fastest_measured(scaled)] == taken
    mixed = [measured[0], *draws.sample(measured[1:], len(measured) - 1)]
    assert mixed[fastest_measured(mixed)] == taken


@pytest.mark.parametrize(
    ("measured_seconds", "taken"), [((1.0, 0.99, 0.90), 2), ((1.0, 0.99), 1), ((1.0, 0.5, 0.505), 1), ((1.0,), 0)]
)
def test_worked_numbers(measured_seconds: tuple[float, ...], taken: int) -> None:
    assert fastest_measured([MeasuredPlan(each, 1.0) for each in measured_seconds]) == taken


def test_a_freer_class_must_be_faster_by_more_than_the_margin() -> None:
    slow, free, strict = MeasuredPlan(1.0, 1.0), MeasuredPlan(0.80, 1.0, "reduced"), MeasuredPlan(0.803, 1.0, "exact")
    assert fastest_measured([slow, free, strict]) == 2
    assert fastest_measured([slow, free, strict._replace(measured_seconds=0.9)]) == 1


@given(several)
def test_measured_times_that_are_sure_stay_as_they_are(measured: list[MeasuredPlan]) -> None:
    assert [one.measured_seconds for one in weighed(measured, 0.0)] == pytest.approx(
        [one.measured_seconds for one in measured]
    )


@given(several, st.floats(0.0, 1.0))
def test_weighed_ratios_are_between_the_measured_and_the_predicted_ones(
    measured: list[MeasuredPlan], error: float
) -> None:
    found = weighed(measured, error)
    assert found[0] == measured[0]
    for one, before in zip(found, measured, strict=True):
        ends = sorted(
            [
                before.measured_seconds / measured[0].measured_seconds,
                before.predicted_seconds / measured[0].predicted_seconds,
            ]
        )
        assert (1 - 1e-9) * ends[0] <= one.measured_seconds / measured[0].measured_seconds <= (1 + 1e-9) * ends[1]
        assert one._replace(measured_seconds=0.0) == before._replace(measured_seconds=0.0)


def test_equal_errors_weigh_alike() -> None:
    _, found = weighed([MeasuredPlan(1.0, 1.0), MeasuredPlan(0.9, 1.2)], RATIO_ERROR)
    assert found.measured_seconds == pytest.approx((0.9 * 1.2) ** 0.5)


@pytest.mark.parametrize("noise", [0.02, 0.04])
def test_weighing_takes_a_fast_plan_more_often_than_either_time_alone(noise: float) -> None:
    """Plans that predictions and few rounds know with an error each, drawn many times."""
    draws = random.Random(0)
    took = Counter[str]()
    for _ in range(1000):
        true = [draws.uniform(1.0, 1.1) for _ in range(4)]
        predicted = [seconds * math.exp(draws.gauss(0.0, RATIO_ERROR / 2**0.5)) for seconds in true]
        seen = [seconds * math.exp(draws.gauss(0.0, noise / 2**0.5)) for seconds in true]
        measured = [MeasuredPlan(*times) for times in zip(seen, predicted, strict=True)]
        fast = [seconds <= 1.02 * min(true) for seconds in true]
        took["measured"] += fast[fastest_measured(measured)]
        took["predicted"] += fast[predicted.index(min(predicted))]
        took["both"] += fast[fastest_measured(weighed(measured, noise))]
    assert took["both"] > max(took["measured"], took["predicted"])


# Contenders


def named(combination: Combination) -> Combination:
    """Return a combination whose levers go by names, so that there are kinds of them."""

    def uses(levers: object) -> tuple[LeverUse, ...]:
        precision, size, regions = (getattr(levers, name) for name in ("precision", "microbatch_size", "regions"))
        names = {"precision": precision != "32-true", "microbatches": size < 4, "checkpointing": bool(regions)}
        used = [name for name, is_used in names.items() if is_used]
        classes = {name: "exact" if name == "checkpointing" else combination.numerics for name in used}
        return tuple(LeverUse(name=name, setting="", brief=name, numerics=classes[name]) for name in used)

    return Combination(combination.levers, combination.problem, uses)


def found(share: float, numerics: Numerics, step_error: float) -> tuple[Confirmed, list[Confirmed]] | None:
    best = chosen(share, numerics)
    if best is None:
        return None
    every = [named(combination) for combination in combinations()]
    within = limits(int(share * plain_bytes()), numerics)
    return best, near_ties(every, within, best, Applied(), step_error=step_error)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.3), st.sampled_from(["exact", "reordered", "reduced"]), st.sampled_from([0.0, 0.2, 3.0]))
def test_near_ties_fit_are_allowed_and_no_slower_than_the_error(
    share: float, numerics: Numerics, step_error: float
) -> None:
    pair = found(share, numerics, step_error)
    if pair is None:
        return
    best, plans = pair
    assert plans[0] == best and len(plans) <= MOST
    assert len({plan.point.levers for plan in plans}) == len(plans)
    for plan in plans[1:]:
        assert plan.prediction.peak_upper_bytes <= int(share * plain_bytes())
        assert plan.prediction.step_seconds <= (1 + step_error) * best.prediction.step_seconds
        assert allows(numerics, plan.point.numerics)
        assert plan.prediction == Applied()(plan.point)


def test_a_larger_error_leaves_more_to_be_run_and_the_plain_step_is_the_first_of_them() -> None:
    counts = []
    for step_error in (0.0, 3.0):
        pair = found(1.3, "reduced", step_error)
        assert pair is not None
        counts.append(len(pair[1]))
    assert counts[0] < counts[1]
    pair = found(1.3, "reduced", 3.0)
    assert pair is not None
    best, plans = pair
    assert not plans[1].point.uses or not plans[0].point.uses


def test_what_can_not_be_applied_or_does_not_fit_once_captured_is_left_out() -> None:
    best = chosen(1.3, "reduced")
    assert best is not None
    every = [named(combination) for combination in combinations()]
    within = limits(int(1.3 * plain_bytes()), "reduced")

    def too_large(point: Candidate) -> Prediction:
        return replace(Applied()(point), peak_upper_bytes=within.budget_bytes + 1)

    for confirm in (lambda _: None, too_large):
        assert near_ties(every, within, best, confirm, step_error=3.0) == [best]


@pytest.mark.parametrize("over", [1.05, 1.3])
def test_a_plan_with_a_wider_error_bar_is_solved_again_for_a_lower_peak(over: float) -> None:
    best = chosen(0.6, "reduced")
    assert best is not None
    within = limits(int(0.6 * plain_bytes()), "reduced")
    every = [named(combination) for combination in combinations()]
    asked: list[Candidate] = []

    def wide(point: Candidate) -> Prediction:
        asked.append(point)
        prediction = Applied()(point)
        return replace(prediction, peak_upper_bytes=int(over * prediction.peak_bytes))

    _, *others = near_ties(every, within, best, wide, step_error=30.0)
    assert others and all(limits_hold(within, plan) for plan in others)
    sizes = {(plan.point.levers.precision, plan.point.levers.microbatch_size) for plan in others}
    assert len(asked) > len(others) == len(sizes)  # of each combination one, and some were asked for again


def limits_hold(within: Limits, plan: Confirmed) -> bool:
    return plan.prediction.peak_upper_bytes <= within.budget_bytes


def test_kinds_come_before_more_of_a_kind() -> None:
    pair = found(0.6, "reduced", 30.0)
    assert pair is not None
    kinds = [frozenset(use.name for use in plan.point.uses) for plan in pair[1][1:]]
    first = list(dict.fromkeys(kinds))
    assert kinds[: len(first)] == first


@pytest.mark.parametrize("other", ["32-true 4", "bf16-mixed 4"])
def test_a_plan_that_runs_in_another_way_is_the_first_of_the_others(other: str) -> None:
    """Also where the plain step fits, and where steps that run alike are predicted to be faster."""
    best = chosen(0.8, "reduced")
    assert best is not None

    def way(levers: Levers) -> bool:
        return f"{levers.precision} {levers.microbatch_size}" == other

    within = limits(int(1.3 * plain_bytes()), "reduced")
    every = [named(combination) for combination in combinations()]
    _, *others = near_ties(every, within, best, Applied(), step_error=30.0, way=way)
    ways = [way(plan.point.levers) for plan in others]
    assert ways[0] != way(best.point.levers) and len(set(ways)) == 2

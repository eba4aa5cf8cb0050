"""The frontier, no point of which is beaten by another of its class, and the choice among plans."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.ir import NUMERICS, Candidate, Levers, LeverUse, Numerics, Precision, Regions
from memfit.solver import (
    COARSE,
    FINE,
    SIMPLER_WITHIN,
    Choice,
    Combination,
    Controller,
    ExpectedStep,
    Solver,
    build,
    fastest,
    frontier,
    options,
)
from tests.models import plain_trace
from tests.solver.test_problem import with_workspaces


def combination(precision: Precision, microbatches: int, numerics: Numerics) -> Combination:
    trace = plain_trace("transformer", precision, microbatches, large=True)
    costs = with_workspaces(trace)
    regions = Regions(trace)
    levers = Levers(precision=precision, microbatch_size=8 // microbatches)
    use = LeverUse(name=numerics, setting="", brief="", numerics=numerics)
    return Combination(levers, build(regions, costs, options(regions, costs)), lambda _: (use,))


@pytest.fixture(scope="module")
def combinations() -> list[Combination]:
    return [
        combination("32-true", 1, "exact"),
        combination("32-true", 2, "reordered"),
        combination("bf16-mixed", 1, "reduced"),
    ]


def beaten(points: list[Candidate]) -> list[Candidate]:
    """Return the points that another of the same or a stricter class beats."""
    rank = NUMERICS.index
    return [
        one
        for one in points
        for other in points
        if other is not one
        and rank(other.numerics) <= rank(one.numerics)
        and other.step_seconds <= one.step_seconds
        and other.peak_bytes <= one.peak_bytes
    ]


def test_no_point_is_beaten_and_all_are_sorted(combinations: list[Combination]) -> None:
    done: list[tuple[int, int]] = []
    points = frontier(combinations, 4, lambda *at: done.append(at))
    assert len(points) >= 5
    assert {p.numerics for p in points} == {"exact", "reordered", "reduced"}
    assert not beaten(points)
    assert all(a.step_seconds <= b.step_seconds for a, b in itertools.pairwise(points))
    assert all(p.peak_bytes <= p.budget_bytes and p.bound_seconds <= p.step_seconds for p in points)
    assert done == [(i, 12) for i in range(1, 13)]


def test_the_comparison_notices_a_beaten_point(combinations: list[Combination]) -> None:
    lean = combinations[0]
    plain = lean.candidate(lean.plain(), 10**12)
    worse = lean.candidate(lean.solver.leanest(), 10**12)
    assert not beaten([plain, worse])
    assert beaten([plain, plain]) == [] and beaten([plain, lean.candidate(lean.plain(), 10**12)])


def test_the_fastest_is_within_budget_and_bounds_all(combinations: list[Combination]) -> None:
    plain = combinations[0].plain()
    for share in (1.0, 0.8, 0.6):
        budget = int(plain.peak_bytes * share)
        chosen = fastest(combinations, budget)
        each = [c for one in combinations if (c := one.fastest(budget, FINE, 10.0)) is not None]
        assert chosen is not None and chosen.peak_bytes <= budget
        best = min(c.step_seconds for c in each)
        assert chosen.step_seconds <= best * (1 + SIMPLER_WITHIN)
        assert chosen.bound_seconds <= best
        assert chosen.status == "feasible" or chosen.step_seconds == best


def test_the_lowest_is_the_same_one_whatever_was_solved_before(combinations: list[Combination]) -> None:
    for c in combinations[:2]:
        solved = Combination(c.levers, c.problem, c.uses_of)
        lowest = solved.lowest(10.0)
        flipped = [lowest.x ^ (np.arange(len(lowest.x)) == i) for i in range(len(lowest.x))]
        assert any(c.problem.peak_bytes(x) == lowest.peak_bytes for x in flipped)  # others are as low
        for budget_bytes in (lowest.peak_bytes, lowest.peak_bytes + 1):
            solved.fastest(budget_bytes, FINE, 2.0)
        assert np.array_equal(solved.lowest(10.0).x, lowest.x)


def test_the_plain_step_wins_where_it_fits(combinations: list[Combination]) -> None:
    chosen = fastest(combinations[:2], combinations[0].plain().peak_bytes)
    assert chosen is not None and chosen.levers.regions == () and chosen.numerics == "exact"


class Noted(Solver):
    """A solver that notes its tolerances: whatever is found, others may be faster."""

    tolerances: list[float]

    def fastest(self, budget_bytes: int, tolerance: float = 0.0, time_limit_seconds: float = 10.0) -> Choice | None:
        self.tolerances.append(tolerance)
        return super().fastest(budget_bytes, tolerance, time_limit_seconds)

    def bound(self, budget_bytes: int, time_limit_seconds: float = 10.0) -> float | None:
        return 0.0


class OfFractions(Solver):
    """A solver of a problem that only fractions fit."""

    def fastest(self, budget_bytes: int, tolerance: float = 0.0, time_limit_seconds: float = 10.0) -> Choice | None:
        return None


def solved_by(kind: type[Solver], combinations: list[Combination]) -> list[Combination]:
    found = [Combination(c.levers, c.problem, c.uses_of) for c in combinations]
    for c in found:
        c.solver = kind(c.problem)
    return found


@pytest.mark.parametrize(("count", "tolerances"), [(1, [FINE]), (2, [COARSE, COARSE, FINE])])
def test_only_several_combinations_are_solved_coarsely_first(
    count: int, tolerances: list[float], combinations: list[Combination]
) -> None:
    Noted.tolerances = []
    chosen = fastest(solved_by(Noted, combinations[:count]), int(combinations[0].plain().peak_bytes * 0.8))
    assert chosen is not None and Noted.tolerances == tolerances


@pytest.mark.parametrize("count", [1, 2])
def test_what_does_not_fit_or_only_by_fractions_has_no_plan(count: int, combinations: list[Combination]) -> None:
    assert fastest(combinations[:count], 1000) is None
    of_fractions = solved_by(OfFractions, combinations[:count])
    assert fastest(of_fractions, combinations[0].plain().peak_bytes) is None


def played(
    factors: list[float], predicted: list[float], steps: int = 300, noise: float = 0.05, drift: int | None = None
) -> list[int]:
    """Return the arms taken where each takes its prediction times its factor; after `drift` steps, reversed."""
    rng = random.Random(0)
    controller = Controller(100, 0.0)
    taken = []
    expected = [ExpectedStep(50.0, seconds) for seconds in predicted]
    for index in range(steps):
        now = factors[::-1] if drift is not None and index >= drift else factors
        arm = controller.choose(0, expected)
        assert arm is not None
        controller.learn(0, arm, expected[arm], predicted[arm] * now[arm] * rng.lognormvariate(0, noise), None)
        taken.append(arm)
    return taken


def test_predictions_that_are_right_up_to_a_common_factor_are_followed() -> None:
    taken = played([3.0, 3.0, 3.0], [1.0, 1.3, 1.6])
    assert taken.count(0) > 290


def test_a_plan_that_is_predicted_too_slow_is_found() -> None:
    taken = played([1.1, 0.8, 1.0], [1.0, 1.05, 1.2])
    assert taken[100:].count(1) > 190


def test_what_changes_is_noticed() -> None:
    taken = played([0.9, 1.0, 1.1], [1.0, 1.0, 1.0], steps=900, drift=300)
    assert taken[200:300].count(0) > 90 and taken[800:].count(2) > 90


@given(
    st.lists(st.tuples(st.floats(1, 200), st.floats(0.1, 10)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.5, 1.5)), max_size=20),
)
def test_only_plans_that_fit_are_taken_and_what_is_measured_counts(
    arms: list[tuple[float, float]], measured: list[tuple[int, float]]
) -> None:
    controller = Controller(100, 0.01)
    expected = [ExpectedStep(peak, seconds) for peak, seconds in arms]
    largest = 1.0
    for which, ratio in measured:
        one = expected[which % len(expected)]
        controller.learn(0, which % len(expected), one, 1.0, int(one.peak_bytes * ratio))
        largest = max(largest, int(one.peak_bytes * ratio) / one.peak_bytes)
    assert controller.correction == largest
    arm = controller.choose(0, expected)
    fitting = [one for one in expected if one.peak_bytes * largest * 1.01 <= 100]
    assert (arm is None) == (not fitting)
    assert arm is None or expected[arm] in fitting


def test_a_plan_that_ran_out_of_memory_is_not_taken_again_nor_any_that_takes_as_much() -> None:
    controller = Controller(100, 0.0)
    expected = [ExpectedStep(95.0, 1.0), ExpectedStep(90.0, 2.0), ExpectedStep(40.0, 3.0)]
    assert controller.choose(0, expected) == 0
    controller.ran_out(expected[1])
    assert controller.choose(0, expected) == 2
    assert controller.fits(ExpectedStep(89.0, 1.0))
    for _ in range(12):
        controller.learn(0, 2, expected[2], 1.0, None)
    assert controller.fits(expected[0])

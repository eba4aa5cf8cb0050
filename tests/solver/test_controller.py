"""The controller: never an unsafe plan, and soon the best one."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from memfit.solver import Controller, ExpectedStep


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

"""Joined activities against those that they are joined from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.solver import ALWAYS, Activity, Tightening

MOST_OPTIONS = 6


def alive(activities: frozenset[Activity], x: npt.NDArray[np.float64]) -> float:
    """Return the largest activity, 0 without any."""
    sums = [(lost, sum(float(x[j]) for j in members)) for lost, members in activities]
    return max([0.0, *(1 - chosen if lost else chosen for lost, chosen in sums)])


def mistakes(tightened: frozenset[Activity], before: frozenset[Activity], conflicts: list[frozenset[int]]) -> int:
    """Return for how many choices without conflicts the joined activities say something else."""
    choices = [np.array([i >> j & 1 for j in range(MOST_OPTIONS)], float) for i in range(2**MOST_OPTIONS)]
    legal = [x for x in choices if all(sum(x[j] for j in members) <= 1 for members in conflicts)]
    return sum(alive(tightened, x) != alive(before, x) for x in legal)


@st.composite
def cases(draw: st.DrawFn) -> tuple[frozenset[Activity], list[frozenset[int]]]:
    """Activities as a storage has them: each lies within a set of options that exclude each other."""
    options = st.integers(0, MOST_OPTIONS - 1)
    conflicts = draw(st.lists(st.frozensets(options, min_size=2), min_size=1, max_size=4))
    activities = set()
    for _ in range(draw(st.integers(1, 6))):
        clique = draw(st.sampled_from(conflicts))
        members = draw(st.frozensets(st.sampled_from(sorted(clique)), min_size=1))
        activities.add((draw(st.booleans()), members))
    return frozenset(activities), conflicts


@given(cases(), st.lists(st.floats(0, 1), min_size=MOST_OPTIONS, max_size=MOST_OPTIONS))
@settings(max_examples=300, deadline=None)
def test_choices_stay_and_fractions_get_dearer(
    case: tuple[frozenset[Activity], list[frozenset[int]]], fractions: list[float]
) -> None:
    activities, conflicts = case
    tightened = Tightening(conflicts)(activities)
    assert mistakes(tightened, activities, conflicts) == 0
    x = np.array(fractions)
    x /= max(1.0, *(sum(x[j] for j in members) for members in conflicts))
    assert alive(tightened, x) >= alive(activities, x) - 1e-9


def test_the_check_sees_a_wrong_one() -> None:
    conflicts = [frozenset({0, 1})]
    assert mistakes(frozenset({(True, frozenset({0}))}), frozenset({(True, frozenset({0, 1}))}), conflicts) > 0


def test_what_is_needed_or_saved_either_way_is_always_alive() -> None:
    """Saved unless 0 or 1 is chosen, an argument of 0 and of 1: halves of them do not make it go."""
    activities = {(True, frozenset({0, 1})), (False, frozenset({0})), (False, frozenset({1}))}
    assert Tightening([frozenset({0, 1})])(activities) == {ALWAYS}


@pytest.mark.parametrize("saved_in", [frozenset({0, 1, 2}), frozenset({0, 1})])
def test_only_options_that_lose_it_everywhere_count(saved_in: frozenset[int]) -> None:
    """Two saves: one lost in 0, 1 and perhaps 2, the other in 1 and 2; all exclude each other."""
    activities = {(True, saved_in), (True, frozenset({1, 2}))}
    assert Tightening([frozenset({0, 1, 2})])(activities) == {(True, saved_in & {1, 2})}

"""Combinations that `make test` runs hold every pair of values."""

from __future__ import annotations

import itertools

from tests.covering import covering, each, some

AXES = (["a", "b", "c", "d"], [1, 2, 3], [True, False])


def test_every_pair_is_in_a_combination_that_is_run_and_all_combinations_are_there() -> None:
    found = covering(*AXES)
    assert [param.values for param in found] == list(itertools.product(*AXES))
    run = [param.values for param in found if not param.marks]
    assert len(run) < len(found) / 1.5
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(values[one], values[other]) for values in run}
        assert pairs == set(itertools.product(AXES[one], AXES[other]))


def test_two_parameters_are_combined_whole() -> None:
    assert all(not param.marks for param in covering(*AXES[:2]))


def test_each_value_is_in_one_of_the_few_combinations_that_are_run_and_all_combinations_are_there() -> None:
    found = each(*AXES)
    assert [param.values for param in found] == list(itertools.product(*AXES))
    run = [param.values for param in found if not param.marks]
    assert len(run) == max(map(len, AXES))
    assert all({values[i] for values in run} == set(axis) for i, axis in enumerate(AXES))


def test_all_of_some_values_are_there() -> None:
    kept, other = some(["a", "b"], ["a"])
    assert kept == "a" and other.values == ("b",) and [mark.name for mark in other.marks] == ["ci"]

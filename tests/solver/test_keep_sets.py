"""The sets of operators worth keeping against every set."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir import Region, Regions, simulate
from memfit.solver import Solver, Worth, build, keep_sets, options
from tests.covering import some
from tests.models import plain_trace
from tests.solver.test_problem import with_workspaces

worths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=9).map(
    lambda found: [Worth(op, nbytes, float(seconds)) for op, (nbytes, seconds) in enumerate(found)]
)


def taken(worth: list[Worth], kept: tuple[int, ...]) -> tuple[int, float]:
    """Return the bytes and the seconds saved of a set."""
    return sum(worth[op].nbytes for op in kept), sum(worth[op].seconds for op in kept)


def beaten(worth: list[Worth], found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return every set that saves more than all that were found of no more bytes."""
    every = (kept for n in range(len(worth) + 1) for kept in itertools.combinations(range(len(worth)), n))
    mine = [(0, 0.0), *(taken(worth, kept) for kept in found)]
    return [k for k in every if taken(worth, k)[1] > max(s for b, s in mine if b <= taken(worth, k)[0])]


@given(worths)
def test_no_set_saves_more_in_as_few_bytes(worth: list[Worth]) -> None:
    found = keep_sets(worth, 10_000)
    assert not beaten(worth, found)
    figures = [taken(worth, kept) for kept in found]
    assert figures == sorted(figures) and len({s for _, s in figures}) == len(figures)


def test_the_comparison_notices_a_set_left_out() -> None:
    worth = [Worth(0, 3, 5.0), Worth(1, 4, 2.0), Worth(2, 5, 9.0)]
    found = keep_sets(worth, 10)
    assert all(beaten(worth, found[:i] + found[i + 1 :]) for i in range(len(found)))


@given(worths.filter(lambda worth: len(worth) <= 6), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_every_set_counts_that_needs_less_while_recomputed(worth: list[Worth], seed: int) -> None:
    rng = np.random.default_rng(seed)
    added, changes = rng.integers(0, 50, 6), rng.integers(-20, 20, (len(worth), 6))
    found = keep_sets(worth, 10_000, (added, changes))

    def figures(kept: tuple[int, ...]) -> tuple[int, float, int]:
        nbytes, seconds = taken(worth, kept)
        return nbytes, -seconds, int((added + changes[list(kept)].sum(axis=0)).max())

    mine = [figures(kept) for kept in ((), *found)]
    for n in range(len(worth) + 1):
        for kept in itertools.combinations(range(len(worth)), n):
            assert any(all(a <= b for a, b in zip(one, figures(kept), strict=True)) for one in mine)


@given(worths, st.integers(1, 6))
def test_few_sets_are_spread_from_the_fewest_to_the_most(worth: list[Worth], most: int) -> None:
    every, few = keep_sets(worth, 10_000), keep_sets(worth, most)
    assert len(few) <= most and set(few) <= set(every)
    assert len(every) <= most or few[-1] == every[-1]


@pytest.mark.parametrize(
    ("name", "fqn"), [("convnet", "stages"), ("recurrent", "attention"), ("unet", "unet.inner.inner")]
)
@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_no_set_of_kept_operators_is_faster_than_a_region_s_options(name: str, fqn: str, seed: int) -> None:
    """Of up to twelve operators that can be kept, against every set of them, each at its own peak."""
    trace = plain_trace(name, large=True)
    costs = with_workspaces(trace, seed)
    regions = Regions(trace)
    mine = [o for o in options(regions, costs) if o.modules == (fqn,) and len(o.regions) == 1]
    solver = Solver(build(regions, costs, mine))
    (region,) = regions.calls_of((fqn,))
    keepable = sorted({op for o in mine for kept in o.kept.values() for op in kept})
    assert 5 <= len(keepable) <= 12  # for which all sets are looked at
    sets = [s for n in range(len(keepable) + 1) for s in itertools.combinations(keepable, n)]
    for kept in random.Random(seed).sample(sets, min(48, len(sets))):
        keep = tuple(sorted(regions.op_key(region, op) for op in kept))
        timeline = simulate(trace, costs, [Region((fqn,), keep)])
        choice = solver.fastest(timeline.peak_bytes)
        assert choice is not None and choice.seconds <= timeline.step_seconds * (1 + 2e-4)

"""The sets of operators worth keeping against every set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.ir.remat import Region, Regions
from memfit.ir.simulate import simulate
from memfit.solve.candidates import options
from memfit.solve.keeps import Worth, keep_sets
from memfit.solve.milp import Solver
from memfit.solve.problem import build
from tests.models import plain_trace
from tests.solve.test_problem import with_workspaces

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


@given(worths, st.integers(1, 6))
def test_few_sets_are_spread_from_the_fewest_to_the_most(worth: list[Worth], most: int) -> None:
    every, few = keep_sets(worth, 10_000), keep_sets(worth, most)
    assert len(few) <= most and set(few) <= set(every)
    assert len(every) <= most or few[-1] == every[-1]


@pytest.mark.parametrize(("name", "fqn"), [("transformer", "blocks.0"), ("convnet", "stages.0")])
def test_no_set_of_kept_operators_is_much_faster_than_a_region_s_options(name: str, fqn: str) -> None:
    trace = plain_trace(name, large=True)
    costs = with_workspaces(trace, seed=3)
    regions = Regions(trace)
    mine = [o for o in options(regions, costs) if o.modules == (fqn,) and len(o.regions) == 1]
    solver = Solver(build(regions, costs, mine))
    (region,) = regions.calls_of((fqn,))
    keepable = sorted({op for o in mine for kept in o.kept.values() for op in kept})[:12]
    sets = [s for n in range(len(keepable) + 1) for s in itertools.combinations(keepable, n)]
    every = []
    for kept in sets[:: max(1, len(sets) // 64)]:
        keep = tuple(sorted(regions.op_key(region, op) for op in kept))
        timeline = simulate(trace, costs, [Region((fqn,), keep)])
        every.append((timeline.peak_bytes, timeline.step_seconds))
    assert len(every) >= 4
    for peak, seconds in every:
        choice = solver.fastest(peak)
        assert choice is not None and choice.seconds <= seconds * (
            1 + 4e-3
        )  # sets that need less while recomputed are not offered

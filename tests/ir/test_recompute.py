"""What runs again, and what is born again."""

from __future__ import annotations

import pytest

from memfit.ir import Recomputation, RegionCall, Regions, recomputations
from tests.models import BUILDERS, plain_trace


def only(regions: Regions, region: RegionCall, kept: frozenset[int] = frozenset()) -> Recomputation:
    (again,) = recomputations(regions, region, kept)
    return again


@pytest.mark.parametrize("name", BUILDERS)
def test_copies_are_born_by_the_operators_that_run_again(name: str) -> None:
    trace = plain_trace(name)
    regions = Regions(trace)
    for region in (call for calls in regions.calls.values() for call in calls):
        everything = only(regions, region).copies
        assert [c.storage for c in everything] == [
            s for op in range(region.start, region.cut) for s in trace.births[op]
        ]
        assert all(region.start <= c.born <= c.released < region.cut for c in everything)
        assert all(c.death == -1 or c.death >= region.recompute_at for c in everything)
        kept = frozenset(range(region.start, region.cut, 2))
        again = only(regions, region, kept)
        assert {c.born for c in again.copies}.isdisjoint(kept)
        assert sorted([*again.rerun, *kept]) == list(range(region.start, region.cut))


def test_the_last_of_nested_regions_runs_again_once() -> None:
    regions = Regions(plain_trace("transformer"))
    run = tuple(f"blocks.{i}" for i in range(len([f for f in regions.calls if f.count(".") == 1 and "blocks" in f])))
    (outer,) = regions.calls_of(run)
    inside = [regions.calls_of((fqn,))[0] for fqn in run]
    around, *rest = recomputations(regions, outer, inside=inside)
    assert around.region is outer and [one.region for one in rest] == inside
    assert around.cut == inside[-1].start < outer.cut
    assert {one.depth for one in rest} == {1} and around.depth == 0
    boundaries = {s for one in inside[1:] for s in one.inputs}
    assert {c.storage for c in around.copies if c.death >= 0} == boundaries
    assert min(rest + [around], key=lambda one: one.order) is around


def test_a_run_holds_its_modules_calls() -> None:
    regions = Regions(plain_trace("transformer"))
    (pair,) = regions.calls_of(("blocks.0", "blocks.1"))
    first, second = (regions.calls_of((f"blocks.{i}",))[0] for i in range(2))
    assert (pair.start, pair.stop) == (first.start, second.stop)
    assert pair.inputs == first.inputs and set(pair.saves) == {*first.saves, *second.saves}
    assert regions.contains(pair, first) and regions.contains(pair, second)
    assert not regions.contains(first, pair) and not regions.contains(pair, pair)
    with pytest.raises(KeyError, match=r"blocks\.1, blocks\.0"):
        regions.calls_of(("blocks.1", "blocks.0"))

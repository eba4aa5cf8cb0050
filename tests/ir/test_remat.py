"""Region calls, the names of their operators, and what is born again."""

from __future__ import annotations

import pytest

from memfit.ir.remat import Regions
from tests.models import BUILDERS, plain_trace


@pytest.mark.parametrize("name", BUILDERS)
def test_operator_keys_name_one_operator_of_a_call(name: str) -> None:
    trace = plain_trace(name)
    regions = Regions(trace)
    for calls in regions.calls.values():
        for region in calls:
            inside = range(region.start, trace.calls[region.call].end)
            keys = [regions.op_key(region, op) for op in inside]
            assert len(set(keys)) == len(keys)
            for op, key in zip(inside, keys, strict=True):
                assert regions.kept_ops(region, (key,)) == {op}
                assert key.rsplit("#", 1)[0] == trace.ops[op].name


def test_keys_count_from_the_call_they_are_in() -> None:
    trace = plain_trace("twice")
    first, second = Regions(trace).calls["shared"]
    regions = Regions(trace)
    keys = [{regions.op_key(r, op) for op in range(r.start, trace.calls[r.call].end)} for r in (first, second)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("name", BUILDERS)
def test_region_calls_are_in_order(name: str) -> None:
    trace = plain_trace(name)
    backward = next(i for i, op in enumerate(trace.ops) if op.phase == "backward")
    for fqn, calls in Regions(trace).calls.items():
        for region in calls:
            assert region.start <= region.cut <= trace.calls[region.call].end <= backward <= region.recompute_at, fqn
            assert region.recompute_at <= region.end
            assert region.saves


@pytest.mark.parametrize("name", BUILDERS)
def test_copies_are_born_by_the_operators_that_run_again(name: str) -> None:
    trace = plain_trace(name)
    regions = Regions(trace)
    for calls in regions.calls.values():
        for region in calls:
            everything = regions.copies(region, set())
            assert [c.storage for c in everything] == [
                s for op in range(region.start, region.cut) for s in trace.births[op]
            ]
            assert all(region.start <= c.born <= c.released < region.cut for c in everything)
            assert all(c.death == -1 or c.death >= region.recompute_at for c in everything)
            kept = set(range(region.start, region.cut, 2))
            assert {c.born for c in regions.copies(region, kept)}.isdisjoint(kept)
            assert not kept.intersection(regions.rerun(region, kept))


def test_modules_without_saves_are_no_regions() -> None:
    regions = Regions(plain_trace("unet"))
    assert "unet.inner.inner" in regions.calls
    assert "unet.inner.inner.inner" not in regions.calls

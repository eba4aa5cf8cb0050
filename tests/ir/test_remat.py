"""Region calls, the names of their operators, and what is born again."""

from __future__ import annotations

import pytest

from memfit.ir import Regions
from tests.models import BUILDERS, plain_trace


@pytest.mark.parametrize("name", BUILDERS)
def test_operator_keys_name_one_operator_of_a_call(name: str) -> None:
    trace = plain_trace(name)
    regions = Regions(trace)
    for calls in regions.calls.values():
        for region in calls:
            inside = range(region.start, region.stop)
            keys = [regions.op_key(region, op) for op in inside]
            assert len(set(keys)) == len(keys)
            for op, key in zip(inside, keys, strict=True):
                assert regions.kept_ops(region, (key,)) == {op}
                assert key.rsplit("#", 1)[0] == trace.ops[op].name


def test_keys_count_from_the_call_they_are_in() -> None:
    trace = plain_trace("twice")
    first, second = Regions(trace).calls["shared"]
    regions = Regions(trace)
    keys = [{regions.op_key(r, op) for op in range(r.start, r.stop)} for r in (first, second)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("name", BUILDERS)
def test_region_calls_are_in_order(name: str) -> None:
    trace = plain_trace(name)
    backward = next(i for i, op in enumerate(trace.ops) if op.phase == "backward")
    for fqn, calls in Regions(trace).calls.items():
        for region in calls:
            assert region.start <= region.cut <= region.stop <= backward <= region.recompute_at, fqn
            assert region.recompute_at <= region.end
            assert region.saves


def test_modules_without_saves_are_no_regions() -> None:
    regions = Regions(plain_trace("unet"))
    assert "unet.inner.inner" in regions.calls
    assert "unet.inner.inner.inner" not in regions.calls

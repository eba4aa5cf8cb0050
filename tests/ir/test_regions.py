"""Region calls and their operators, what runs and is born again, and what waits in host memory."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memfit.ir import (
    COPY_IN,
    COPY_OUT,
    LEAST_BYTES,
    Op,
    OpCost,
    Recomputation,
    Region,
    RegionCall,
    Regions,
    Storage,
    Trace,
    simulate,
)
from tests.models import BUILDERS, COSTS, captured, plain_trace, transformer


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


def only(regions: Regions, region: RegionCall, kept: frozenset[int] = frozenset()) -> Recomputation:
    (again,) = regions.recomputations(region, kept)
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
    around, *rest = regions.recomputations(outer, inside=inside)
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


LINK = msgspec.structs.replace(COSTS, link_bytes_per_second=1e9)


def first_block() -> tuple[Trace, Regions, RegionCall]:
    """Return a trace of one microbatch with its regions, and the call of its first block."""
    trace = plain_trace("transformer", "32-true", 1, large=True)
    regions = Regions(trace)
    (region,) = regions.calls_of(("blocks.0",))
    return trace, regions, region


def test_arguments_wait_until_just_before_they_are_needed() -> None:
    trace, regions, region = first_block()
    (one,) = regions.transfers(region, frozenset(), "blocks.1")
    assert one.landed == trace.calls[region.calls[0]].end - 1 < one.fetched < region.recompute_at
    backward = [i for i, op in enumerate(trace.ops) if op.phase == "backward"]
    assert one.fetched == next(i for i in backward if trace.fqn_of(trace.ops[i].call).startswith("blocks.1"))
    assert regions.transfers(region, frozenset(), "")[0].fetched == -1
    assert regions.transfers(region, frozenset(), "nowhere")[0].fetched == -1


def test_small_outputs_stay_on_the_device() -> None:
    trace, regions, region = first_block()
    moved = regions.transfers(region, frozenset(range(region.start, region.stop)), "")
    born = {s for op in range(region.start, region.stop) for s in trace.births[op]}
    assert {m.storage for m in moved} - born == {m.storage for m in regions.transfers(region, frozenset(), "")}
    assert {m.storage for m in moved} & born == {s for s in born if trace.storages[s].nbytes >= LEAST_BYTES} != born


def test_pinned_memory_is_rounded_up_to_a_power_of_two() -> None:
    trace = plain_trace("transformer", "32-true", 2, large=True)
    regions = Regions(trace)
    moved = [m for r in regions.calls_of(("blocks.0",)) for m in regions.transfers(r, frozenset(), "")]
    sizes = [trace.storages[m.storage].nbytes for m in moved]
    assert len(sizes) == 2  # one for each microbatch, of which one is there at a time
    assert regions.host_bytes(moved) == 1 << (sizes[0] - 1).bit_length()


@pytest.mark.parametrize("rate", [1e6, 1e9, 1e15])
def test_what_the_computation_does_not_hide_is_waited_for(rate: float) -> None:
    trace, regions, region = first_block()
    costs = msgspec.structs.replace(COSTS, link_bytes_per_second=rate)
    seconds = np.full(len(trace.ops), 1e-6)
    (one,) = moved = regions.transfers(region, frozenset(), "blocks.1")
    copy = trace.storages[one.storage].nbytes / rate
    forward, backward = (region.stop - region.start) * 1e-6, (region.recompute_at - one.fetched) * 1e-6
    expected = max(0.0, copy - forward) + max(0.0, copy - backward)
    assert regions.stall_seconds(costs, seconds, region, moved) == pytest.approx(expected)


def offloading(rate: float) -> tuple[float, float]:
    """Return how long a step with a region whose argument is offloaded takes, simulated, and without offload."""
    trace = plain_trace("transformer", "32-true", 1, large=True)
    costs = msgspec.structs.replace(COSTS, link_bytes_per_second=rate)
    found = (
        simulate(trace, costs, [Region(("blocks.0",), offload=offload, prefetch="blocks.1" if offload else "")])
        for offload in (True, False)
    )
    moved, kept = (timeline.step_seconds for timeline in found)
    return moved, kept


def test_a_slow_link_costs_time_and_a_fast_one_none() -> None:
    slow, kept = offloading(1e6)
    fast, _ = offloading(1e15)
    assert fast == kept < slow


def scheduled(*names: str) -> list[float]:
    """Return the seconds of each point of a step of copies, waits and other operators, on a GPU.

    An operator takes a second, a copy three; "in" and "wait in" are of one storage.
    """
    wait = "memfit.wait.default"
    kinds = {"out": COPY_OUT, "in": COPY_IN, "wait out": wait, "wait in": wait, "op": "aten.mm.default"}
    ops = [Op(kinds[n], -1, "forward", 0, list(kinds).index(n), (0,) if n.endswith("in") else (), False) for n in names]
    seconds = {"out": 3.0, "in": 3.0, "wait out": 0.0, "wait in": 0.0, "op": 1.0}
    trace: Trace = msgspec.structs.replace(
        captured(transformer()),
        device="a100-80gb",
        ops=ops,
        calls=[],
        saves=[],
        signatures=list(kinds),
        storages=[Storage(8, -1, len(ops), -1, "activations", -1)],
    )
    costs = msgspec.structs.replace(
        COSTS, dispatch_seconds=0.0, ops={name: OpCost(value, 0, False) for name, value in seconds.items()}
    )
    return simulate(trace, costs).seconds


def test_copies_run_beside_the_computation_until_one_is_waited_for() -> None:
    assert scheduled("out", "op", "op", "wait out", "op") == [0, 1, 1, 1, 1]
    assert scheduled("out", "op", "op", "op", "op", "wait out") == [0, 1, 1, 1, 1, 0]
    assert scheduled("out", "out", "op", "wait out") == [0, 0, 1, 5]
    assert scheduled("out", "op", "in", "op", "wait in") == [0, 1, 0, 1, 2]
    assert scheduled("out", "in", "op", "wait in", "wait out") == [0, 0, 1, 2, 0]

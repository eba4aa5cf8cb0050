"""`simulate` with a selection against the capture of the step with that selection applied."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from memfit.ir import (
    Mode,
    OpCost,
    Precision,
    Region,
    Regions,
    Replay,
    Sharding,
    Timeline,
    between,
    kernel_text,
    simulate,
)
from memfit.ranks import shard, with_share_of_update
from memfit.solver import options
from memfit.workload import batch_size_of
from tests.covering import each
from tests.models import BUILDERS, COSTS, LARGE, captured, plain_trace, random_selection, regions_of

TOLERANCE_BYTES = 4096
"""The random state that a checkpoint keeps, and copies of running statistics."""

SHARES_CASTS = ("recurrent", "twice")
"""Autocast casts the weights of these once for several calls; the simulation then keeps a cast too long."""


def peaks(timeline: Timeline) -> dict[str, int]:
    """Return the peak of the forward passes, of the backward passes, and of the optimizer."""
    totals = [sum(values) for values in zip(*timeline.live_bytes.values(), strict=True)]
    found: dict[str, int] = {}
    for total, phase in zip(totals, timeline.phases, strict=True):
        name = "backward" if phase == "recompute" else phase
        found[name] = max(total, found.get(name, 0))
    return found


def differs(simulated: Timeline, applied: Timeline, *, slack: float = 0.0) -> list[str]:
    """Return the phases whose peaks differ, with how much; `slack` is a share by which the simulation may be above."""
    one, other = peaks(simulated), peaks(applied)
    return [
        f"{phase}: {other[phase] - one[phase]} bytes"
        for phase in one
        if not -TOLERANCE_BYTES - slack * one[phase] <= other[phase] - one[phase] <= TOLERANCE_BYTES
    ]


def both(name: str, precision: Precision, microbatches: int, seed: int) -> tuple[Timeline, Timeline]:
    """Return the simulation of a random selection, and the simulation of the step captured with it."""
    plain = plain_trace(name, precision, microbatches, large=True)
    selection = random_selection(random.Random(seed), options(Regions(plain), COSTS), share=0.8)
    assert selection
    workload = BUILDERS[name](**LARGE[name])
    size = batch_size_of(workload.batch) // microbatches
    applied = captured(workload, precision=precision, microbatch_size=size, regions=selection)
    return simulate(plain, COSTS, selection), simulate(applied, COSTS)


@pytest.mark.parametrize(("name", "microbatches"), each(BUILDERS, [1, 2]))
def test_simulated_checkpointing_is_the_applied_one(name: str, microbatches: int) -> None:
    simulated, applied = both(name, "32-true", microbatches, seed=microbatches)
    assert not differs(simulated, applied)
    assert abs(simulated.peak_bytes - applied.peak_bytes) <= TOLERANCE_BYTES


@pytest.mark.parametrize(("name", "microbatches"), each(BUILDERS, [1, 2]))
def test_simulated_checkpointing_under_autocast_is_the_applied_one(name: str, microbatches: int) -> None:
    simulated, applied = both(name, "bf16-mixed", microbatches, seed=5)
    assert not differs(simulated, applied, slack=0.04 if name in SHARES_CASTS else 0.0)


def test_four_microbatches_are_simulated_from_two() -> None:
    simulated, applied = both("transformer", "32-true", 4, seed=1)
    assert not differs(simulated, applied)


def test_what_a_region_keeps_lives_until_its_recomputation_is_done_with_it() -> None:
    plain = plain_trace("transformer", "32-true", 2, large=True)
    found = [o.regions[0].keep for o in options(Regions(plain), COSTS) if o.modules == ("blocks.1",)]
    selection = regions_of({"blocks.1": max(found, key=len)})
    workload = BUILDERS["transformer"](**LARGE["transformer"])
    applied = captured(workload, microbatch_size=4, regions=selection)
    assert not differs(simulate(plain, COSTS, selection), simulate(applied, COSTS))


def test_the_comparison_notices_checkpointing_that_is_not_applied() -> None:
    plain = simulate(plain_trace("convnet", large=True), COSTS)
    simulated, applied = both("convnet", "32-true", 1, 0)
    assert differs(plain, applied)
    assert differs(simulated, plain, slack=0.04)


def test_an_unknown_region_is_refused() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        simulate(plain_trace("twice"), COSTS, regions_of({"nowhere": ()}))


def test_nothing_selected_changes_nothing() -> None:
    trace = plain_trace("unet")
    assert simulate(trace, COSTS, regions_of({})) == simulate(trace, COSTS)


def test_the_timeline_adds_up() -> None:
    trace = plain_trace("convnet")
    timeline = simulate(trace, COSTS)
    totals = [sum(values) for values in zip(*timeline.live_bytes.values(), strict=True)]
    assert timeline.peak_bytes == max(totals) == totals[timeline.peak_index] == sum(timeline.at_peak().values())
    assert all(value >= 0 for values in timeline.live_bytes.values() for value in values)
    by_hand = [sum(s.nbytes for s in trace.storages if s.birth <= i <= s.death) for i in range(len(trace.ops))]
    assert totals == by_hand
    assert timeline.step_seconds == pytest.approx(len(trace.ops) * COSTS.dispatch_seconds)


@pytest.mark.parametrize(("name", "microbatches"), each(["transformer", "tied", "convnet", "unet", "twice"], [1, 2]))
def test_a_step_of_another_size_is_replayed_as_if_alone(name: str, microbatches: int) -> None:
    small, large = (captured(BUILDERS[name](batch=size * microbatches), microbatch_size=size) for size in (2, 6))
    assert small.is_program_of(large)
    costs = replace(COSTS, ops={text: OpCost(1e-3, 7 << 10, False) for text in large.signatures})
    rng = random.Random(0)
    for _ in range(4):
        regions = random_selection(rng, options(Regions(small), COSTS))
        alone = Replay(large, costs, regions)
        shared = Replay(small, COSTS, regions).under(costs, large)
        assert shared.timeline() == alone.timeline()
        assert (shared.peak_bytes(), shared.step_seconds()) == (alone.peak_bytes(), alone.step_seconds())
        assert list(shared.lives()) == list(alone.lives())
        assert list(shared.allocations()) == list(alone.allocations())


def test_a_step_of_another_size_that_waits_in_host_memory_is_replayed_as_if_alone() -> None:
    small, large = (captured(BUILDERS["transformer"](batch=size), microbatch_size=size) for size in (2, 16))
    costs = replace(COSTS, link_bytes_per_second=1e9)
    regions = [Region(modules=(fqn,), offload=True) for fqn in ("blocks.0", "blocks.1")]
    alone, shared = Replay(large, costs, regions), Replay(small, costs, regions).under(costs, large)
    assert alone.moved and shared.timeline() == alone.timeline()


@pytest.mark.parametrize("mode", ["ddp", "zero2", "zero3"])
def test_a_step_of_other_ranks_is_replayed_as_if_alone(mode: Mode) -> None:
    trace = plain_trace("transformer", "32-true", 2)
    two, six = (
        with_share_of_update(shard(trace, Sharding(world_size=ranks, mode=mode)), Sharding(world_size=ranks, mode=mode))
        for ranks in (2, 6)
    )
    assert two.is_program_of(six)
    regions = random_selection(random.Random(1), options(Regions(two), COSTS))
    alone, shared = Replay(six, COSTS, regions), Replay(two, COSTS, regions).under(COSTS, six)
    assert shared.timeline() == alone.timeline() and shared.peak_bytes() == alone.peak_bytes()


def test_the_second_microbatch_stands_for_all_later() -> None:
    trace = plain_trace("transformer", "32-true", 4)
    times = trace.repeats
    assert trace.microbatches == 2 and trace.scale_microbatches == 4
    for op, count in zip(trace.ops, times, strict=True):
        assert count == (3 if op.microbatch == 1 and op.phase != "optimizer" else 1)


def test_recomputed_seconds_are_those_of_the_operators_that_run_again() -> None:
    trace = plain_trace("twice")
    regions = Regions(trace)
    plain, planned = simulate(trace, COSTS), simulate(trace, COSTS, regions_of({"shared": ()}))
    again = sum(call.cut - call.start for call in regions.calls["shared"])
    extra = again * COSTS.dispatch_seconds + len(regions.calls["shared"]) * COSTS.checkpoint_seconds
    assert len(regions.calls["shared"]) == 2
    assert planned.step_seconds - plain.step_seconds == pytest.approx(extra)


ONLY_OVERHEAD = replace(COSTS, ops={}, dispatch_seconds=0.0, checkpoint_seconds=1.0, selective_op_seconds=0.0)
RECOMPUTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "transformer": (("blocks.0",), ("blocks.1.mlp",), ("norm", "head")),
    "convnet": (("stem.0", "stem.1"), ("stages",)),
    "twice": (("shared",),),
}


@pytest.mark.parametrize(("name", "microbatches"), each(RECOMPUTED, [1, 4]))
def test_what_a_captured_step_recomputes_costs_what_was_simulated(name: str, microbatches: int) -> None:
    regions = {modules: Region(modules) for modules in RECOMPUTED[name]}
    plain, workload = plain_trace(name, "32-true", microbatches, large=True), BUILDERS[name](**LARGE[name])
    size = batch_size_of(workload.batch) // microbatches
    applied = captured(workload, microbatch_size=size, regions=[*regions.values()])
    simulated = simulate(plain, ONLY_OVERHEAD, [*regions.values()])
    calls = 2 if name == "twice" else len(regions)
    assert simulate(applied, ONLY_OVERHEAD).step_seconds == simulated.step_seconds == calls * microbatches
    assert simulate(plain, ONLY_OVERHEAD).step_seconds == 0.0 and not plain.recomputed_runs


@pytest.mark.parametrize(
    ("amid", "count"),
    [
        ("memfit.wait.default", 1),
        ("memfit.copy_in.default", 1),
        ("c10d._allgather_base_.default", 1),
        ("aten.detach.default", 1),
        ("aten.mm.default", 2),
    ],
)
def test_what_arrives_amid_a_recomputation_does_not_end_it(amid: str, count: int) -> None:
    applied = captured(BUILDERS["transformer"](**LARGE["transformer"]), regions=[Region(("blocks.0",))])
    (run,) = applied.recomputed_runs
    middle = run[len(run) // 2]
    other = replace(applied.ops[middle], phase="backward", name=amid)
    runs = replace(applied, ops=[*applied.ops[:middle], other, *applied.ops[middle:]]).recomputed_runs
    assert sum(map(len, runs)) == len(run) and len(runs) == count


def test_a_recomputation_costs_its_overhead_and_more_beside_kept_operators() -> None:
    applied = captured(BUILDERS["transformer"](**LARGE["transformer"]), regions=[Region(("blocks.0",))])
    (run,) = applied.recomputed_runs
    costs = replace(ONLY_OVERHEAD, selective_op_seconds=1e-3)
    assert ONLY_OVERHEAD.captured_overheads(applied) == costs.captured_overheads(applied) == {run[0]: 1.0}
    maker = applied.fqn_of(applied.ops[run[len(run) // 2]].call)
    beside = sum(applied.fqn_of(applied.ops[index].call) == maker for index in run)
    kept = replace(applied, selective=[maker])
    assert 0 < beside < len(run)
    assert costs.captured_overheads(kept) == {run[0]: pytest.approx(1.0 + 1e-3 * beside)}
    assert costs.captured_overheads(replace(kept, selective=["blocks.1"])) == {run[0]: 1.0}
    # what compiled code computes again costs its kernels alone
    fused = replace(applied, signatures=[kernel_text((signature,)) for signature in applied.signatures])
    assert ONLY_OVERHEAD.captured_overheads(fused) == {}


# A step of another size, from two that were captured, is the one that would have been captured


@pytest.mark.parametrize(("name", "microbatches"), each(["transformer", "convnet", "unet", "twice"], [1, 2]))
def test_a_size_between_two_is_the_captured_one(name: str, microbatches: int) -> None:
    low, middle, high = (
        captured(BUILDERS[name](batch=size * microbatches), microbatch_size=size) for size in (2, 5, 8)
    )
    found = between(low, high, 5)
    assert found is not None
    was, wanted = ([(t.signatures[op.signature], t.works[op.signature]) for op in t.ops] for t in (found, middle))
    assert was == wanted
    assert found.storages == middle.storages
    assert simulate(found, COSTS).peak_bytes == simulate(middle, COSTS).peak_bytes
    assert (found.batch_size, found.microbatch_size) == (middle.batch_size, middle.microbatch_size)


@pytest.mark.ci
def test_two_microbatches_stand_for_more() -> None:
    two, five = (captured(BUILDERS["transformer"](batch=2 * count), microbatch_size=2) for count in (2, 5))
    found = two.of_samples(10)
    assert (found.scale_microbatches, found.batch_size) == (five.scale_microbatches, five.batch_size)
    assert simulate(found, COSTS).step_seconds == simulate(five, COSTS).step_seconds


def test_what_is_not_of_one_program_or_would_not_be_whole_is_not_made_up() -> None:
    low, high = (captured(BUILDERS["transformer"](batch=size)) for size in (2, 8))
    other = captured(BUILDERS["convnet"](batch=8))
    assert low.is_program_of(high) and not low.is_program_of(other)
    grown = [replace(s, nbytes=s.nbytes + 1) if s.birth >= 0 else s for s in high.storages]
    for unlike in (other, replace(high, ops=high.ops[:-1]), replace(high, storages=grown)):
        assert between(low, unlike, 5) is None
    low, high = (captured(BUILDERS["recurrent"](batch=size)) for size in (2, 8))
    assert between(low, high, 5) is None  # a library sizes its buffers

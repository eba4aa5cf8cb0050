"""Sharded steps against forms worked out by hand, and what holds for every step. Real ranks: test_one_rank_measured."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from memfit.errors import UsageError
from memfit.ir import Precision, Regions, Trace, simulate
from memfit.ranks import Insertion, Mode, Sharding, communication, repeated_blocks, shard, with_share_of_update
from memfit.solver import options
from memfit.workload import Workload
from tests.covering import each
from tests.models import BUILDERS, COSTS, LARGE, captured, plain_trace, random_selection, regions_of, transformer

MODES: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")
LAYERS, WIDTH = 6, 64
WEIGHT = 4 * WIDTH**2
ACTIVATIONS = 4 * WIDTH * (LAYERS + 4)
"""More than all activations of the MLP together."""


def mlp_workload(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Workload:
    """Linear layers without bias on one sample: weights are all that counts."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    batch = torch.randn(1, WIDTH)
    return Workload(model, batch, lambda model, x: model(x).sum(), optimizer(model.parameters(), lr=0.1))


@functools.cache
def mlp(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Trace:
    return captured(mlp_workload(optimizer))


@functools.cache
def bf16_gpt() -> Trace:
    workload = transformer(dim=64, layers=4)
    workload.model.bfloat16()
    return captured(workload)


def peak(trace: Trace, mode: Mode, world_size: int, **given: object) -> int:
    sharded = shard(trace, Sharding(world_size=world_size, mode=mode, **given))  # type: ignore[arg-type]
    return simulate(sharded, COSTS).peak_bytes


def resident(trace: Trace, category: str) -> int:
    return sum(s.nbytes for s in trace.storages if s.category == category and s.birth < 0 and s.death == len(trace.ops))


def buckets(trace: Trace, **given: int) -> list[int]:
    sharded = shard(trace, Sharding(world_size=2, mode="ddp", **given))
    return [s.nbytes for s in sharded.storages[len(trace.storages) :] if s.category == "gradients"]


# By hand


@pytest.mark.parametrize(
    ("mode", "world_size", "views", "by_hand"),
    [
        ("ddp", 8, False, 3 * LAYERS * WEIGHT),  # weights, gradients and buckets
        ("ddp", 8, True, 2 * LAYERS * WEIGHT + WEIGHT),  # weights and buckets, and one gradient
        # In the second layer's backward pass: its weight and gradient, the first's gather, the third's reduction.
        *(("zero3", n, False, (2 * LAYERS - 2) * (WEIGHT // n) + 4 * WEIGHT) for n in (2, 4, 16)),
        # When the last layer's weight is copied out: all weights, its gather, and the one before that waits for it.
        *(("zero2", n, False, LAYERS * WEIGHT // n + (LAYERS + 2) * WEIGHT) for n in (2, 4, 16)),
    ],
)
def test_peaks_are_those_by_hand(mode: Mode, world_size: int, views: bool, by_hand: int) -> None:
    assert 0 <= peak(mlp(), mode, world_size, gradient_as_bucket_view=views) - by_hand <= ACTIVATIONS


def test_zero1_keeps_the_state_of_its_own_weights() -> None:
    sharded = shard(mlp(torch.optim.Adam), Sharding(world_size=4, mode="zero1"))
    owned = math.ceil(LAYERS / 4)
    assert resident(sharded, "optimizer state") == owned * (2 * WEIGHT + 4)
    one_update = sum(s.nbytes for s in sharded.storages if s.category == "temporaries" and s.nbytes == WEIGHT)
    assert one_update > 0


@pytest.mark.parametrize("world_size", [2, 8])
def test_mixed_precision_keeps_sixteen_bytes_of_each_parameter_among_all_ranks(world_size: int) -> None:
    """Rajbhandari et al. (2020), section 3.1: 2 + 2 + 12 bytes with Adam; FSDP2's 4 + 4 + 8 are as many."""
    trace = bf16_gpt()
    numel = sum(math.prod(p.shape) for p in trace.parameters)
    given = Sharding(world_size=world_size, mode="zero3", shard_itemsize=4, reduce_itemsize=4)
    sharded = shard(trace, given)
    steps = 4 * len(trace.parameters)
    timeline = simulate(sharded, COSTS)
    gradients = timeline.live_bytes["gradients"][timeline.phases.index("optimizer")]
    kept = resident(sharded, "parameters") + resident(sharded, "optimizer state") + gradients
    assert kept == 16 * numel // world_size + steps


def test_bytes_sent_are_those_of_ring_algorithms_for_every_microbatch() -> None:
    total = LAYERS * WEIGHT
    sent = {mode: communication(mlp(torch.optim.Adam), Sharding(world_size=4, mode=mode), 1e9) for mode in MODES}
    share = 3 / 4
    assert sent["ddp"].all_reduce_bytes == 2 * share * total == sent["zero1"].all_reduce_bytes
    assert sent["zero1"].all_gather_bytes == share * total
    assert (sent["zero2"].all_gather_bytes, sent["zero2"].reduce_scatter_bytes) == (share * total, share * total)
    assert (sent["zero3"].all_gather_bytes, sent["zero3"].reduce_scatter_bytes) == (2 * share * total, share * total)
    assert sent["ddp"].all_gather_bytes == sent["ddp"].reduce_scatter_bytes == sent["zero3"].all_reduce_bytes == 0
    assert sent["zero3"].seconds == pytest.approx(3 * share * total / 1e9)
    given = Sharding(world_size=2, mode="zero3")
    once, thrice = (communication(plain_trace("transformer", "32-true", m), given, 1e9) for m in (1, 4))
    assert thrice.reduce_scatter_bytes == 4 * once.reduce_scatter_bytes
    assert thrice.all_gather_bytes == 4 * once.all_gather_bytes


# Units


def test_blocks_are_the_units() -> None:
    assert repeated_blocks(plain_trace("transformer")) == ("blocks.0", "blocks.1")
    assert repeated_blocks(plain_trace("convnet")) == ("stages.0", "stages.1")
    assert repeated_blocks(mlp()) == tuple(str(i) for i in range(LAYERS))
    assert repeated_blocks(plain_trace("unet")) == ()


def test_units_given_by_name_hold_only_what_they_contain() -> None:
    trace = plain_trace("transformer")
    named = shard(trace, Sharding(world_size=2, mode="zero3", units=("blocks.0", "blocks.1")))
    assert replace(named, sharding=None) == replace(shard(trace, Sharding(world_size=2, mode="zero3")), sharding=None)
    one = shard(trace, Sharding(world_size=2, mode="zero3", units=("blocks.1",)))
    gathers = [trace.modules[s.owner].fqn for s in one.storages if s.category == "parameters" and s.birth >= 0]
    inside = sum(p.fqn.startswith("blocks.1.") for p in trace.parameters)
    assert gathers.count("") == len(trace.parameters) - inside
    assert gathers.count("blocks.1") == 2 * inside


# DDP's and ZeRO's own rules


@given(*[st.integers(1, 50_000)] * 2)
@settings(deadline=None, max_examples=20)
def test_buckets_hold_everything_and_are_full_but_for_the_last(first: int, cap: int) -> None:
    trace = plain_trace("transformer")
    found = buckets(trace, bucket_cap_bytes=cap, first_bucket_bytes=first)
    assert sum(found) == sum(s.nbytes for s in trace.storages if s.category == "gradients")
    assert all(nbytes >= (cap if i else first) for i, nbytes in enumerate(found[:-1]))
    assert len(found) > 1 and len(buckets(trace, first_bucket_bytes=2**40)) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
def test_zero1_gives_each_parameters_state_to_one_rank_by_its_size(world_size: int) -> None:
    trace = plain_trace("transformer")
    state = resident(trace, "optimizer state")
    most = resident(shard(trace, Sharding(world_size=world_size, mode="zero1")), "optimizer state")
    largest = max(2 * p.nbytes for p in trace.parameters) + 4 * len(trace.parameters)
    assert state / world_size <= most <= min(state, state / world_size + largest)


# What holds for every step

names = st.sampled_from(("tied", "convnet", "recurrent"))  # shared weights, buffers, and neither; blocks and none
worlds = st.sampled_from([1, 2, 3, 8, 100])
shardings = st.builds(
    Sharding, world_size=worlds, mode=st.sampled_from(MODES), gradient_as_bucket_view=st.booleans()
)  # fmt: skip


@settings(deadline=None, max_examples=15)
@given(names, shardings, st.sampled_from([("32-true", 2), ("bf16-mixed", 1)]))
def test_a_sharded_step_is_a_step(name: str, given: Sharding, levers: tuple[Precision, int]) -> None:
    precision, microbatches = levers
    assume(name != "recurrent" or precision == "32-true")  # there are CPUs without an LSTM in bfloat16
    trace = plain_trace(name, precision, microbatches)
    sharded = shard(trace, given)
    own = [op for op in sharded.ops if op.signature < len(trace.signatures)]
    assert own == trace.ops
    count = len(sharded.ops)
    assert all(-1 <= s.birth <= s.death <= count and s.nbytes >= 0 for s in sharded.storages)
    assert [(s.category, s.owner, s.parameter) for s in sharded.storages[: len(trace.storages)]] == [
        (s.category, s.owner, s.parameter) for s in trace.storages
    ]
    timeline = simulate(sharded, COSTS)
    assert all(value >= 0 for values in timeline.live_bytes.values() for value in values)


@settings(deadline=None, max_examples=60)
@given(names, st.sampled_from(["zero2", "zero3"]), worlds, st.sampled_from([1, 2]))
def test_what_is_resident_is_one_shard_and_gradients_are_reduced_once(
    name: str, mode: Mode, world_size: int, microbatches: int
) -> None:
    trace = plain_trace(name, "32-true", microbatches)
    sharded = shard(trace, Sharding(world_size=world_size, mode=mode))
    shards = [torch.empty(p.shape).chunk(world_size)[0].nbytes for p in trace.parameters]
    assert resident(sharded, "parameters") == sum(shards)
    timeline = simulate(sharded, COSTS)
    updating = len(timeline.phases) - timeline.phases[::-1].index("backward")
    assert timeline.live_bytes["gradients"][updating] == sum(shards)
    assert sum(s.nbytes for s in sharded.storages if s.category == "parameters" and s.death == len(sharded.ops)) == sum(
        shards
    )


@settings(deadline=None, max_examples=15)
@given(names, shardings, st.integers(0, 1000))
def test_checkpointing_applies_to_a_sharded_step(name: str, given: Sharding, seed: int) -> None:
    trace = plain_trace(name)
    single = [option for option in options(Regions(trace), COSTS) if len(option.modules) == 1]
    selection = random_selection(random.Random(seed), single)
    sharded = shard(trace, given)
    plain, chosen = simulate(sharded, COSTS), simulate(sharded, COSTS, selection)
    assert all(value >= 0 for values in chosen.live_bytes.values() for value in values)
    again = sum(phase == "recompute" for phase in chosen.phases) - sum(phase == "recompute" for phase in plain.phases)
    assert again >= sum(phase == "recompute" for phase in simulate(trace, COSTS, selection).phases)


@pytest.mark.parametrize(("mode", "name"), each(MODES, BUILDERS))
def test_more_ranks_hold_no_more(name: str, mode: Mode) -> None:
    """With sizes that can be divided. From one rank to two, gathers and reductions come in."""
    trace = plain_trace(name, large=True)
    even = all(p.shape[0] % 8 == 0 for p in trace.parameters)
    peaks = [peak(trace, mode, n) for n in (2, 4, 8)]
    padding = 0 if even or mode in ("ddp", "zero1") else 8 * 8 * sum(p.nbytes // p.shape[0] for p in trace.parameters)
    assert all(more <= fewer + padding for fewer, more in zip(peaks, peaks[1:], strict=False))


@pytest.mark.parametrize("name", BUILDERS)
def test_one_rank_holds_buckets_and_nothing_else_more_and_each_stage_no_more_than_the_one_before(name: str) -> None:
    trace = plain_trace(name, large=True)
    peaks = [peak(trace, mode, 8) for mode in MODES]
    assert name not in ("transformer", "tied", "convnet") or peaks == sorted(peaks, reverse=True)
    total = sum(s.nbytes for s in trace.storages if s.category == "gradients")
    buffers = sum(s.nbytes for s in trace.storages if s.category == "buffers")
    plain = simulate(trace, COSTS).peak_bytes
    for mode in ("ddp", "zero1"):
        assert plain + total <= peak(trace, mode, 1) <= plain + total + buffers


def test_operators_put_in_move_calls_and_saves_along_and_none_change_nothing() -> None:
    trace = plain_trace("transformer")
    assert Insertion(trace).result() == trace
    insertion = Insertion(trace)
    for position in range(0, len(trace.ops) + 1, 3):
        insertion.op("pause", 0, position, like=0, call=-1)
    moved = insertion.result()
    selection = regions_of({"blocks.0": (), "blocks.1": ()})
    assert simulate(moved, COSTS, selection).peak_bytes == simulate(trace, COSTS, selection).peak_bytes
    assert [moved.ops[c.start].name for c in moved.calls] == [trace.ops[c.start].name for c in trace.calls]
    assert [moved.ops[c.end - 1].name for c in moved.calls] == [trace.ops[c.end - 1].name for c in trace.calls]


# Wrong use


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"mode": "zero4"}, "mode='zero4'"),
        ({"units": ("nowhere",)}, "'nowhere'"),
        ({"units": ("",)}, "units="),
    ],
)
def test_a_sharding_that_does_not_fit_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shard(mlp(), Sharding(**{"world_size": 2, "mode": "zero3", **given}))  # type: ignore[arg-type]


def test_a_trace_without_parameters_and_a_link_without_a_rate_are_refused() -> None:
    with pytest.raises(UsageError, match="capture it again"):
        shard(replace(mlp(), parameters=[]), Sharding(world_size=2, mode="ddp"))
    with pytest.raises(UsageError, match="link_bytes_per_second=0"):
        communication(mlp(), Sharding(world_size=2, mode="ddp"), 0.0)


@pytest.mark.ci
@pytest.mark.parametrize(("mode", "microbatches"), each(MODES, [1, 2]))
def test_a_step_captured_with_checkpointing_is_sharded_as_one_simulated_with_it(mode: Mode, microbatches: int) -> None:
    given = Sharding(world_size=4, mode=mode)
    selection = regions_of({"blocks.0": (), "blocks.1": ()})
    plain = plain_trace("transformer", "32-true", microbatches, large=True)
    workload = transformer(**LARGE["transformer"])
    applied = captured(workload, microbatch_size=8 // microbatches, regions=selection)
    simulated = simulate(shard(plain, given), COSTS, selection)
    again = simulate(shard(applied, given), COSTS)
    assert abs(simulated.peak_bytes - again.peak_bytes) <= 4096
    assert communication(plain, given, 1e9) == communication(applied, given, 1e9)


def test_the_update_of_a_rank_is_its_share_of_the_work() -> None:
    trace = plain_trace("transformer")

    def updated_bytes(trace: Trace) -> int:
        ops = [op for op in trace.ops if op.phase == "optimizer" and op.name.startswith("aten.")]
        return sum(trace.works[op.signature].write_bytes for op in ops)

    for mode, share in {"ddp": 1.0, "zero1": 0.25, "zero3": 0.25}.items():
        sharding = Sharding(world_size=4, mode=mode)  # type: ignore[arg-type]
        sharded = with_share_of_update(shard(trace, sharding), sharding)
        assert updated_bytes(sharded) == pytest.approx(share * updated_bytes(trace), rel=0.01)

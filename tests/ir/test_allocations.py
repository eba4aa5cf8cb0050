"""What a program allocates, against the simulation of its memory."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from memfit.hardware import find_device
from memfit.ir import (
    AllocationEvent,
    AllocatorSettings,
    CostTable,
    Levers,
    OpCost,
    Region,
    Regions,
    Replay,
    Trace,
    allocations,
    replay,
    simulate,
)
from memfit.planner import capture_plain
from memfit.solver import options
from memfit.workload import Loop, batch_size_of
from tests.models import BUILDERS, COSTS, plain_trace, random_selection, regions_of


def costly(trace: Trace) -> CostTable:
    """Costs under which every operator has a workspace of another size, and libraries keep some."""
    ops = {text: OpCost(1e-6, 512 * (i % 7), False) for i, text in enumerate(trace.signatures)}
    return replace(COSTS, ops=ops, resident_workspace_bytes=2 * 8_519_680)


def peak_bytes(events: list[AllocationEvent]) -> int:
    """The most that is asked for at once; a birth of what is alive, or a death of what is not, raises."""
    return replay(events, AllocatorSettings()).peak_requested_bytes


def test_events_without_labels_are_the_same_otherwise() -> None:
    trace = plain_trace("transformer", "32-true", 2)
    labelled = allocations(trace, costly(trace))
    bare = list(Replay(trace, costly(trace), ()).allocations(is_labelled=False))
    assert [replace(event, label="") for event in labelled] == [replace(event, label="") for event in bare]
    assert any(event.label for event in labelled) and not any(event.label for event in bare if event.point >= 0)


def told(event: AllocationEvent) -> tuple[int, int, bool, str]:
    """An event without the number of its storage."""
    return event.point, event.nbytes, event.alloc, event.label


def selections(trace: Trace) -> list[Sequence[Region]]:
    found = options(Regions(trace), COSTS)
    return [[], *(random_selection(random.Random(seed), found, share=0.8) for seed in range(3))]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_replay_asks_for_what_the_simulation_counts(name: str, microbatches: int) -> None:
    trace = plain_trace(name, "32-true", microbatches)
    for selection in selections(trace):
        free = simulate(trace, COSTS, selection).peak_bytes
        assert peak_bytes(allocations(trace, COSTS, selection)) == free
        if microbatches == 1:  # workspaces are in both
            costs = costly(trace)
            simulated = simulate(trace, costs, selection).peak_bytes
            assert peak_bytes(allocations(trace, costs, selection)) == simulated > free


@pytest.mark.parametrize("name", BUILDERS)
def test_the_second_step_repeats_in_the_third(name: str) -> None:
    trace = plain_trace(name)
    for selection in selections(trace):
        two, three = (allocations(trace, costly(trace), selection, steps) for steps in (2, 3))
        one = allocations(trace, costly(trace), selection, 1)
        assert two[: len(one)] == one and three[: len(two)] == two
        third, second = three[len(two) :], two[len(one) :]
        assert [told(event) for event in third] == [told(event) for event in second]
        reports = [replay(events, AllocatorSettings()) for events in (one, two, three)]
        assert reports[0].allocated_bytes == reports[1].allocated_bytes == reports[2].allocated_bytes
        assert reports[1].peak_requested_bytes == reports[2].peak_requested_bytes


def test_state_is_made_by_the_first_optimizer_step_and_stays() -> None:
    trace = plain_trace("transformer")
    events = allocations(trace, COSTS, steps=2)
    born = [i for i, e in enumerate(events) if e.category == "optimizer state" and e.alloc]
    state = [s for s in trace.storages if s.category == "optimizer state"]
    assert len(born) == len(state) > 0
    assert all(trace.ops[events[i].point].phase == "optimizer" for i in born)
    assert not any(e.category == "optimizer state" and not e.alloc for e in events)


def looped(loop: Loop) -> Trace:
    """The trace of a step in a loop of the user's."""
    workload = dataclasses.replace(BUILDERS["transformer"](), loop=loop)
    return capture_plain(workload, Levers(microbatch_size=batch_size_of(workload.batch)), find_device("cpu"))


def test_the_first_step_has_no_gradients_before_its_backward_pass() -> None:
    for loop in (Loop(zero_grad="after-forward"), Loop(set_to_none=False)):
        trace = looped(loop)
        first = next(event for event in allocations(trace, COSTS) if event.category == "gradients")
        assert first.alloc and trace.ops[first.point].phase == "backward"


def test_what_a_step_leaves_to_the_next_stays_where_it_was_made() -> None:
    trace = looped(Loop(holds_outputs="next-forward", zero_grad="after-forward"))
    events = allocations(trace, COSTS, steps=3)
    starts = [i for i, (one, other) in enumerate(itertools.pairwise(events), 1) if other.point < one.point]
    gradients = sum(storage.category == "gradients" and storage.birth >= 0 for storage in trace.storages)
    assert len(starts) == 2 and gradients
    for start, end in itertools.pairwise(
        [0, *starts, len(events)]
    ):  # each once in a step: none is made again for the next
        assert sum(event.alloc and event.category == "gradients" for event in events[start:end]) == gradients
    assert peak_bytes(events) == simulate(trace, COSTS).peak_bytes


def test_an_unknown_region_is_refused() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        allocations(plain_trace("twice"), COSTS, regions_of({"nowhere": ()}))


def test_the_comparison_notices_a_storage_left_out() -> None:
    trace = plain_trace("convnet")
    most = max(range(len(trace.storages)), key=lambda i: trace.storages[i].nbytes * (trace.storages[i].birth < 0))
    events = [e for e in allocations(trace, COSTS) if e.storage != most]
    assert peak_bytes(events) != simulate(trace, COSTS).peak_bytes

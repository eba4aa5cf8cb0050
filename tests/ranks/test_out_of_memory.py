"""Out of memory on one rank of several: undone on all, the same lower plan on all, and none waits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule

import memfit
from memfit import ir
from memfit.errors import MemfitError, NonFiniteError, OutOfMemoryError, PlanError, PlanMismatchError, UsageError
from memfit.ir import Levers, Plan, Region, Sharding
from memfit.training import Recovery, Rollback, Step
from memfit.workload import Workload
from tests.bombs import Bomb
from tests.pipeline.plans import with_frontier
from tests.processes import on_ranks
from tests.ranks import test_engines as engines
from tests.ranks.test_engines import workload
from tests.ranks.trainings import UNITS, whole

STEPS = 4
FIRST, SECOND, ANSWERED = 0, 1, 3
"""Steps: that creates the optimizer's state; in which each collective is voted on; and in which none is."""

ALIKE = ("ddp", "ddp, reduced at the last", "ddp with views", "kept", "kept, reduced at the last", "resharded")
SHARDINGS = {
    **{name: engines.SHARDINGS[name] for name in ALIKE},
    "on the host": Sharding(world_size=2, mode="zero3", units=UNITS, offload=True),
    "hybrid": Sharding(world_size=4, mode="zero3", units=UNITS, replicas=2),
}


def plan_of(sharding: Sharding) -> Plan:
    """A plan with two microbatches of a sample, and two below it: with the blocks checkpointed, one and both."""
    plan = memfit.plan(
        made(Levers(microbatch_size=1, sharding=sharding)),
        budget="90%",
        numerics="exact",
        precisions=["32-true"],
        points=1,
    )
    first, second = (Region((unit,)) for unit in UNITS)
    plan = with_frontier(plan, [(), (first,), (first, second)])
    frontier = [replace(c, levers=replace(c.levers, sharding=sharding, microbatch_size=1)) for c in plan.frontier]
    return replace(plan, levers=frontier[0].levers, frontier=frontier, allowed="reordered")


def decoded(data: bytes) -> Plan:
    return ir.codec.decode(data, Plan, source="the test")


def made(levers: Levers, *, counted: bool = False) -> Workload:
    assert levers.sharding is not None
    return workload(2 * levers.sharding.world_size, counted=counted)


def weights(work: Workload) -> list[str]:
    """Return what identifies the numbers of each parameter, and of each buffer."""
    tensors = [*work.model.parameters(), *work.model.buffers()]
    return [hashlib.sha256(whole(t).numpy().tobytes()).hexdigest()[:12] for t in tensors]


def outcome(work: Workload, step: Step) -> dict[str, Any]:
    recovery = step.recovery
    assert isinstance(recovery, Recovery)
    events = [(event.step, event.error.kind) for event in recovery.events]
    return {"weights": weights(work), "events": events, "regions": len(recovery.plan.levers.regions)}


def trained(plan: Plan, bombs: dict[tuple[int, int], int] | None = None, *, counted: bool = False) -> dict[str, Any]:
    """Train with bombs by (rank, step); return what came of it."""
    work, places = made(plan.levers, counted=counted), []
    with memfit.apply(plan, work, recover=True) as step:
        seen: list[int] = []
        work.optimizer.register_step_pre_hook(lambda *_: seen.append(bomb.count))
        work.optimizer.register_step_post_hook(lambda *_: seen.append(bomb.count))
        for index in range(STEPS):
            at = (bombs or {}).get((dist.get_rank(), index))
            with Bomb(*(() if at is None else (at,))) as bomb:
                step(work.batch)
            places.append(seen[-1] if index == FIRST else seen[-2])
        return {**outcome(work, step), "places": places}


def each_place(rank: int, data: bytes, count: int, counted: bool) -> Iterator[Any]:
    """Rank 1 runs out at places over the whole of three steps; return what each gave."""
    plan = decoded(data)
    undisturbed = trained(plan, counted=counted)
    lower = trained(replace(plan, levers=plan.frontier[1].levers), counted=counted)
    assert undisturbed["weights"] == lower["weights"] and undisturbed["events"] == []
    places = torch.tensor(undisturbed["places"])
    dist.broadcast(places, 1)
    steps = [FIRST, SECOND, ANSWERED]
    shares = [-(-count // 3), -(-(count - 1) // 3), count // 3]
    for index, share in zip(steps, shares, strict=True):
        for n in range(share):
            at = 1 + round(n * (int(places[index]) - 1) / max(1, share - 1))
            found = trained(plan, {(1, index): at}, counted=counted)
            assert found["weights"] == lower["weights"], (index, at)
            assert found["events"] == [(index + 1, "allocator" if rank == 1 else "another rank")], (index, at)
            yield found["regions"]


PLACES = 6
"""Of each case; `benchmarks.distributed` has forty."""


def _marked(name: str, counted: bool) -> object:
    many = (pytest.mark.ci, pytest.mark.slow) if counted or name not in ("ddp", "resharded") else ()
    return pytest.param(name, counted, marks=many)


@pytest.mark.parametrize(
    ("name", "counted"),
    [*(_marked(name, False) for name in SHARDINGS), _marked("ddp", True), _marked("resharded", True)],
)
def test_wherever_it_runs_out_on_one_rank_it_is_undone_on_all(name: str, counted: bool) -> None:
    """Forward and backward passes, recomputation's probe, norm, clipping, the optimizer's first state."""
    sharding = SHARDINGS[name]
    found = on_ranks(sharding.world_size, each_place, ir.codec.encode(plan_of(sharding)), PLACES, counted)
    assert found == [[1] * PLACES] * sharding.world_size


# What else may happen, each by data parallelism and fully sharded


def by_hand(plan: Plan, rank: int, at_pass: int) -> dict[str, Any]:
    """Rank 1 asks for far too much in the third step, at some forward pass of the first block: it really fails."""
    work = made(plan.levers)
    block, passes = work.model.get_submodule(UNITS[0]), 0

    def ask(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if rank == 1 and is_third and passes == at_pass:
            torch.empty(2**60)

    block[1].register_forward_hook(ask)  # type: ignore[index]
    with memfit.apply(plan, work, recover=True) as step:
        for index in range(STEPS):
            is_third, passes = index == 2, 0
            step(work.batch)
        return outcome(work, step)


def without_a_lower_plan(plan: Plan, rank: int) -> dict[str, Any]:
    """Rank 1 always runs out, from the second step on."""
    work = made(plan.levers)
    with memfit.apply(plan, work, recover=True) as step:
        step(work.batch)
        before = weights(work)

        def run_out(*_: Any) -> None:
            if rank == 1:
                raise MemoryError

        work.model.get_submodule(UNITS[0]).register_forward_hook(run_out)
        with pytest.raises(OutOfMemoryError, match="and under 2 with a lower peak") as caught:
            step(work.batch)
        assert not caught.value.is_torn
        return {"unchanged": weights(work) == before}


def stopped(plan: Plan, rank: int, *, is_finite: bool) -> dict[str, Any]:
    """Rank 1 errs, or has a loss that is not finite, in a step that is voted on and in one that is not; all go on."""
    work, is_wrong = made(plan.levers), False
    kind, text = (ValueError, "of its own") if rank == 1 else (MemfitError, "another rank failed")
    if not is_finite:  # and so is the loss of all
        kind, text = NonFiniteError, "the loss is nan"

    def disturb(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        if is_wrong and rank == 1 and is_finite:
            raise ValueError("of its own")
        return out * math.inf if is_wrong and rank == 1 else out

    work.model.get_submodule(UNITS[1] if is_finite else "prefix").register_forward_hook(disturb)
    with memfit.apply(plan, work, recover=True) as step:
        for index in range(STEPS):
            if index in (SECOND, ANSWERED):
                is_wrong = True
                with pytest.raises(kind, match=text):
                    step(work.batch)
                is_wrong = False
            step(work.batch)
        return outcome(work, step)


def in_the_update(plan: Plan, rank: int) -> dict[str, Any]:
    """Rank 1 has no room for the update of the third step, and then runs out in the middle of it."""
    work = made(plan.levers)
    has_room, index, injured = Rollback.has_room, 0, 0
    Rollback.has_room = staticmethod(lambda *given: has_room(*given) and not (rank == 1 and index == 2))  # type: ignore[method-assign]

    def injure(*_: Any) -> None:
        nonlocal injured
        if rank == 1 and index == 2 and not injured:
            injured = bomb.count + 40
            bomb.at.add(injured)

    try:
        with memfit.apply(plan, work, recover=True) as step:
            work.optimizer.register_step_pre_hook(injure)
            for index in range(STEPS):  # noqa: B007  (read by what runs in the step)
                with Bomb() as bomb:
                    step(work.batch)
            return outcome(work, step)
    finally:
        Rollback.has_room = staticmethod(has_room)  # type: ignore[method-assign]


def without_recovery(plan: Plan, rank: int) -> dict[str, Any]:
    work = made(plan.levers)
    with memfit.apply(plan, work) as step:
        for _ in range(STEPS):
            step(work.batch)
        return {"weights": weights(work)}


def other_shapes(plan: Plan, rank: int) -> dict[str, Any]:
    """Smaller batches in between: their steps are voted on apart."""
    work = made(plan.levers)
    with memfit.apply(plan, work, recover=True) as step:
        for index in range(8):
            samples = 2 if index % 2 else 4
            with Bomb(*((60,) if (rank, index) == (1, 7) else ())):
                step({name: tensor[:samples] for name, tensor in work.batch.items()})
        return outcome(work, step)


def refusing(plan: Plan, rank: int) -> dict[str, Any]:
    mine = replace(plan, frontier=plan.frontier[: 2 + rank])
    with pytest.raises(PlanMismatchError, match="different plans"):
        memfit.apply(mine, made(plan.levers), recover=True)
    with pytest.raises(PlanError, match="sharding can't be combined with a plan for each batch's shapes"):
        memfit.apply(plan, made(plan.levers), adaptive=True)
    return {}


CASES: dict[str, Callable[[Plan, int], dict[str, Any]]] = {
    "undisturbed": lambda plan, rank: trained(plan),
    "without recovery": without_recovery,
    "both at once": lambda plan, rank: trained(plan, {(0, SECOND): 40, (1, SECOND): 38}),
    "one after the other": lambda plan, rank: trained(plan, {(0, SECOND): 40, (1, ANSWERED): 150}),
    "in the forward pass": lambda plan, rank: by_hand(plan, rank, at_pass=1),
    # A block runs again under the first lower plan.
    "in the recomputation": lambda plan, rank: by_hand(replace(plan, levers=plan.frontier[1].levers), rank, at_pass=2),
    "in the update": in_the_update,
    "without a lower plan": without_a_lower_plan,
    "failing otherwise": lambda plan, rank: stopped(plan, rank, is_finite=True),
    "not finite": lambda plan, rank: stopped(plan, rank, is_finite=False),
    "other shapes": other_shapes,
    "refusing": refusing,
}


def each_case(rank: int, data: bytes) -> Iterator[dict[str, Any]]:
    yield from (case(decoded(data), rank) for case in CASES.values())


Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["ddp", pytest.param("resharded", marks=pytest.mark.ci)])
def found(request: pytest.FixtureRequest) -> Found:
    """What every case gave on both ranks, in one pair of processes."""
    by_rank = on_ranks(2, each_case, ir.codec.encode(plan_of(SHARDINGS[request.param])))
    return dict(zip(CASES, map(list, zip(*by_rank, strict=True)), strict=True))


IN_THE_THIRD = [(3, "another rank")], [(3, "allocator")]
EVENTS: dict[str, Any] = {
    "undisturbed": ([], []),
    "in the forward pass": IN_THE_THIRD,
    "in the recomputation": IN_THE_THIRD,
    "in the update": IN_THE_THIRD,  # in the middle of it, where it may lack memory
    "other shapes": ([(8, "another rank")], [(8, "allocator")]),
}
REGIONS = {"both at once": 1, "one after the other": 2, "in the forward pass": 1, "in the recomputation": 2}
"""How many plans lower both ranks end."""


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_end_alike_and_as_if_undisturbed(found: Found, name: str) -> None:
    one, other = found[name]
    assert one.get("weights") == other.get("weights")
    assert name == "other shapes" or one.get("weights") in (None, found["undisturbed"][0]["weights"])
    if name in EVENTS:
        assert (one["events"], other["events"]) == EVENTS[name]
    if name in REGIONS:
        assert one["regions"] == other["regions"] == REGIONS[name]
        assert len(one["events"]) == len(other["events"]) == (2 if name == "one after the other" else 1)
    assert one.get("unchanged", True) and other.get("unchanged", True)  # without a lower plan all stop as they were


# Buffers, and what can't be


class Counting(nn.Module):
    """Counts its passes in a buffer, which ranks make equal before each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("passes", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1  # type: ignore[operator]
        return self.linear(x) * self.passes.sum()  # type: ignore[union-attr, operator]


def counting_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * 1e-3  # type: ignore[no-any-return]


def counting() -> Workload:
    torch.manual_seed(0)
    model = Counting()
    return Workload(model, torch.randn(4, 4), counting_loss, torch.optim.SGD(model.parameters(), lr=0.1))


def with_buffers(rank: int, data: bytes) -> Iterator[Any]:
    plan = decoded(data)
    for index, at in [(9, 0), *((step, at) for step in (1, 4) for at in range(1, 40, 3))]:
        work = counting()
        with memfit.apply(plan, work, recover=True) as step:
            for number in range(5):
                with Bomb(*((at,) if (rank, number) == (1, index) else ())):
                    step(work.batch)
            found = outcome(work, step)
            yield found["weights"], len(found["events"])


@pytest.mark.ci
def test_buffers_are_those_before_the_step_on_all_ranks() -> None:
    plan = memfit.plan(counting(), budget="90%", numerics="exact", precisions=["32-true"], points=1)
    plan = with_frontier(plan, [(), (Region(("linear",)),)])
    sharding = Sharding(world_size=2, mode="ddp")
    frontier = [replace(c, levers=replace(c.levers, sharding=sharding, microbatch_size=2)) for c in plan.frontier]
    plan = replace(plan, levers=frontier[0].levers, frontier=frontier, allowed="reordered")
    one, other = on_ranks(2, with_buffers, ir.codec.encode(plan))
    assert one == other
    (expected, none), *disturbed = one
    assert none == 0
    assert all(found == expected and events == 1 for found, events in disturbed)


def refused(rank: int, data: bytes) -> Iterator[Any]:
    plan = decoded(data)
    assert plan.levers.sharding is not None
    copies = replace(plan.levers, sharding=replace(plan.levers.sharding, replicas=2))
    with pytest.raises(UsageError, match="use levers.sharding.mode='ddp'"):
        memfit.apply(replace(plan, levers=copies), made(copies), recover=True)
    reset_iter_state = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        with pytest.raises(UsageError, match="needs torch 2.13"):
            memfit.apply(plan, made(plan.levers), recover=True)
    finally:
        FSDPModule.reset_iter_state = reset_iter_state  # type: ignore[method-assign]
    yield True


def test_what_can_not_be_undone_is_refused_by_name() -> None:
    assert on_ranks(2, refused, ir.codec.encode(plan_of(SHARDINGS["resharded"]))) == [[True]] * 2

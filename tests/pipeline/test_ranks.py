"""Two ranks over gloo: what runs out of memory on one is undone on both, and both go on as under the lower plan."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.errors import MemfitError, NonFiniteError, OutOfMemoryError, UsageError
from memfit.ir import codec
from memfit.ir.plan import Plan
from memfit.ir.remat import Region
from memfit.levers.stack import applied
from memfit.pipeline._adapt import Adaptive
from memfit.training.guards.rank_agreement import check_can_recover
from memfit.training.guards.recovery import Recovery
from memfit.workload import Workload, fingerprint
from tests.bombs import Bomb
from tests.pipeline.frontiers import with_frontier
from tests.processes import free_port, on_two_ranks

STEPS, SAMPLES, WIDTH = 3, 6, 8


def workload_of(rank: int) -> Workload:
    """The same shapes on each rank, and other numbers: `apply` makes the first rank's weights those of all."""
    torch.manual_seed(rank)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    batch = torch.randn(SAMPLES, WIDTH) * (1 + rank), torch.randn(SAMPLES, 2)
    return Workload(model, batch, squared_error, torch.optim.AdamW(model.parameters(), lr=0.1), max_grad_norm=1.0)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = ((model(batch[0]) - batch[1]) ** 2).mean()
    return loss


def plan_of_two() -> Plan:
    """A plan of no regions, with one below it that checkpoints both blocks, and one that checkpoints the model."""
    plan = memfit.plan(workload_of(0), budget="90%", numerics="exact", precisions=["32-true"], points=1)
    return with_frontier(plan, [(), (Region(("0",)), Region(("1",))), (Region(("",)),)])


def weights(workload: Workload) -> list[str]:
    """Return what identifies the numbers of each parameter, and then of each buffer."""
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    return [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest()[:12] for t in tensors]


def trained(rank: int, plan: Plan, bombs: dict[tuple[int, int], int] | None = None) -> dict[str, Any]:
    """Train with bombs by (rank, step); return what came of it."""
    workload = workload_of(rank)
    with memfit.apply(plan, workload, recover=True, process_group=dist.group.WORLD) as step:
        assert isinstance(step.recovery, Recovery)
        for index in range(STEPS):
            at = (bombs or {}).get((rank, index))
            with Bomb(*(() if at is None else (at,))):
                step(workload.batch)
        kinds = [(e.step, e.error.kind) for e in step.recovery.events]
        return {"weights": weights(workload), "events": kinds, "regions": len(step.recovery.plan.levers.regions)}


def in_the_update(rank: int, plan: Plan) -> dict[str, Any]:
    """Rank 1 runs out where the optimizer's state is to be copied to the host, and before that was agreed on."""
    workload = workload_of(rank)
    with memfit.apply(plan, workload, recover=True, process_group=dist.group.WORLD) as step:
        assert isinstance(step.recovery, Recovery)
        rollback, calls = step.recovery._rollback, 0
        copy_what_has_no_room = rollback._tensors

        def tensors() -> Any:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return copy_what_has_no_room()

        rollback._tensors = tensors  # type: ignore[method-assign]
        for _ in range(STEPS):
            step(workload.batch)
        return {"weights": weights(workload), "events": [(e.step, e.error.kind) for e in step.recovery.events]}


def by_hand(rank: int, plan: Plan) -> dict[str, Any]:
    """The same training with `DistributedDataParallel`."""
    workload = workload_of(rank)
    model = DistributedDataParallel(workload.model)
    for _ in range(STEPS):
        workload.optimizer.zero_grad()
        squared_error(model, workload.batch).backward()
        nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0)
        workload.optimizer.step()
    return {"weights": weights(workload)}


def without_a_lower_plan(rank: int, plan: Plan) -> dict[str, Any]:
    """Rank 1 always runs out."""
    workload = workload_of(rank)
    with memfit.apply(plan, workload, recover=True, process_group=dist.group.WORLD) as step:
        step(workload.batch)
        before = weights(workload)
        if rank == 1:
            workload.model.register_forward_hook(run_out)
        with pytest.raises(OutOfMemoryError, match="and 2 below it") as caught:
            step(workload.batch)
        return {"unchanged": weights(workload) == before and not caught.value.is_torn}


def run_out(*_: Any) -> None:
    raise MemoryError


def failing_otherwise(rank: int, plan: Plan) -> dict[str, Any]:
    """Rank 1's loss is not finite: rank 0 does not wait for it, and both can go on."""
    workload = workload_of(rank)
    with memfit.apply(plan, workload, recover=True, process_group=dist.group.WORLD) as step:
        before = weights(workload)
        batch = workload.batch if rank == 0 else (workload.batch[0] * torch.inf, workload.batch[1])
        with pytest.raises(
            NonFiniteError if rank else MemfitError, match="the loss is nan" if rank else "another rank"
        ):
            step(batch)
        unchanged = weights(workload)[:-3] == before[:-3]
        step(workload.batch)
        return {"unchanged": unchanged, "weights": weights(workload)}


def adapting(rank: int, plan: Plan) -> dict[str, Any]:
    """Ranks with batches of other sizes take the plan for the larger one, and learn the same."""
    workload = workload_of(rank)
    assert isinstance(workload.model, nn.Sequential)
    workload.model[2] = nn.Identity()  # BatchNorm takes no single sample
    workload = dataclasses.replace(workload, optimizer=torch.optim.SGD(workload.model.parameters(), lr=0.1))
    plan = replace(plan, fingerprint=fingerprint(workload))
    with memfit.adapt(plan, workload, process_group=dist.group.WORLD) as step:
        assert isinstance(step.recovery, Adaptive)
        for one, other in [(6, 6), (6, 3), (2, 4), (3, 3), (5, 2)]:
            step(tuple(t[: other if rank else one] for t in workload.batch))
        return {
            "weights": weights(workload),
            "taken": sorted(step.recovery.taken.items()),
            "learned": sorted((k, v.count, v.mean) for k, v in step.recovery.controller._beliefs.items()),
        }


def other_plans(rank: int, plan: Plan) -> dict[str, Any]:
    mine = replace(plan, frontier=plan.frontier[: 2 + rank])
    with pytest.raises(UsageError, match="different plans.*save it"):
        memfit.apply(mine, workload_of(rank), recover=True, process_group=dist.group.WORLD)
    return {}


CASES: dict[str, Callable[[int, Plan], dict[str, Any]]] = {
    "undisturbed": trained,
    "lower from the start": lambda rank, plan: trained(rank, replace(plan, levers=plan.frontier[1].levers)),
    **{
        f"bomb at {at}": lambda rank, plan, at=at: trained(rank, plan, {(1, 0): at})  # type: ignore[misc]
        for at in (1, 10, 25, 40)
    },
    "both at once": lambda rank, plan: trained(rank, plan, {(0, 0): 9, (1, 0): 30}),
    "one after the other": lambda rank, plan: trained(rank, plan, {(0, 0): 9, (1, 1): 30}),
    "in the update": in_the_update,
    "by hand": by_hand,
    "without a lower plan": without_a_lower_plan,
    "failing otherwise": failing_otherwise,
    "adapting": adapting,
    "other plans": other_plans,
}


def each_case(rank: int, data: bytes) -> Iterator[dict[str, Any]]:
    plan = codec.decode(data, Plan, source="the test")
    for case in CASES.values():
        yield case(rank, plan)


Found = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What every case gave on both ranks, in one pair of processes."""
    by_rank = on_two_ranks(each_case, codec.encode(plan_of_two()))
    return dict(zip(CASES, zip(*by_rank, strict=True), strict=True))


def test_an_undisturbed_training_is_that_of_ddp_bitwise(found: Found) -> None:
    """But for the running statistics of the second rank, which DDP makes those of the first at the next step."""
    (one, other), (hand, other_hand) = found["undisturbed"], found["by hand"]
    assert one["weights"] == other["weights"] == hand["weights"]
    assert other_hand["weights"][:-3] == hand["weights"][:-3] and one["events"] == []


@pytest.mark.parametrize("at", [1, 10, 25, 40])
def test_what_runs_out_on_one_rank_is_undone_on_both(found: Found, at: int) -> None:
    one, other = found[f"bomb at {at}"]
    (expected, _) = found["lower from the start"]
    assert one["weights"] == other["weights"] == expected["weights"]
    assert one["events"] == [(1, "another rank")] and other["events"] == [(1, "allocator")]
    assert one["regions"] == other["regions"] == 2


def test_on_both_at_once_it_is_one_plan_lower_and_one_after_the_other_two(found: Found) -> None:
    for name, count, regions in (("both at once", 1, 2), ("one after the other", 2, 1)):
        one, other = found[name]
        assert one["weights"] == other["weights"] == found["lower from the start"][0]["weights"]
        assert len(one["events"]) == len(other["events"]) == count
        assert one["regions"] == other["regions"] == regions


def test_right_before_the_update_too(found: Found) -> None:
    one, other = found["in the update"]
    assert one["weights"] == other["weights"] == found["undisturbed"][0]["weights"]
    assert (one["events"], other["events"]) == ([(2, "another rank")], [(2, "allocator")])


def test_without_a_lower_plan_both_stop_as_they_were(found: Found) -> None:
    assert all(rank["unchanged"] for rank in found["without a lower plan"])


def test_another_error_on_one_rank_does_not_leave_the_other_waiting(found: Found) -> None:
    one, other = found["failing otherwise"]
    assert one["unchanged"] and other["unchanged"] and one["weights"] == other["weights"]


def test_adapting_ranks_choose_and_learn_the_same(found: Found) -> None:
    one, other = found["adapting"]
    assert one["weights"] == other["weights"]
    assert one["taken"] == other["taken"] and sum(count for _, count in one["taken"]) == 5
    assert one["learned"] == other["learned"]


def test_ranks_have_one_plan(found: Found) -> None:
    assert found["other plans"] == ({}, {})


# What can't be


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_ranks_that_send_in_the_middle_of_a_pass_can_not_recover() -> None:
    with pytest.raises(UsageError, match="Workload.model is a DistributedDataParallel.*process_group="):
        check_can_recover(DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="inner is a DistributedDataParallel"):
        check_can_recover(nn.ModuleDict({"inner": DistributedDataParallel(nn.Linear(2, 2))}))
    sharded = nn.Linear(2, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UsageError, match="parameters are sharded"):
        check_can_recover(sharded)
    check_can_recover(nn.Linear(2, 2))


@pytest.mark.usefixtures("_process_group")
def test_what_would_drift_apart_is_refused() -> None:
    plan = plan_of_two()
    with pytest.raises(UsageError, match="recover=True"):
        memfit.apply(plan, workload_of(0), process_group=dist.group.WORLD)
    rounding = dataclasses.replace(workload_of(0), bf16_updates="stochastic-rounding")
    plan = replace(
        plan, levers=replace(plan.levers, precision="bf16-true"), fingerprint=fingerprint(rounding), frontier=[]
    )
    with pytest.raises(UsageError, match="master-weights"):
        memfit.apply(plan, rounding, recover=True, process_group=dist.group.WORLD)
    with applied(replace(plan.levers, precision="32-true"), rounding) as step:  # nothing was left on the model
        step(rounding.batch)

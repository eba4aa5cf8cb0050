"""`memfit.apply`: the training step that runs a plan, with its limit, its recovery and its snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from memfit import ir
from memfit.capture import Accumulation
from memfit.cost import known_workspace_bytes
from memfit.errors import UsageError
from memfit.foundations import on_unused
from memfit.hardware import find_device
from memfit.ir import CostTable, OpCost, Plan, allocations
from memfit.levers import (
    LIMIT,
    LeversOn,
    Switch,
    applied,
    check_as_given,
    check_lever_names,
    check_plan,
    device_under,
    host_bytes_of,
    lever_names,
    without_switched,
)
from memfit.pipeline.adaptive import Adaptive, Admission
from memfit.pipeline.placement import check_launched, placed
from memfit.pipeline.verbs import applying, checked
from memfit.planner import capture_levers, without_coupled
from memfit.ranks import check_same
from memfit.report import write_snapshot
from memfit.training import (
    AcceleratorLimit,
    CpuLimit,
    Growth,
    OutOfMemoryObserver,
    Recovery,
    Snapshots,
    Step,
    check_host,
    device_of,
    held_tensors,
    host_needs,
)
from memfit.workload import Workload

if TYPE_CHECKING:  # distributed packages take a second to import
    from torch.distributed.device_mesh import DeviceMesh


_UNUSED = (
    "the step of memfit.apply(...) was never called, so no step ran under the whole plan: call step(batch)"
    " instead of forward, backward, optimizer.step() and zero_grad(), and close the step at the end"
)


@checked
@applying
def apply(
    plan: Plan,
    workload: Workload,
    *,
    recover: bool = False,
    adaptive: bool = False,
    limit_bytes: int | None = None,
    snapshots: str | Path | None = None,
    mesh: DeviceMesh | None = None,
) -> Step:
    """Return the training step that runs a plan on a workload.

    The workload's modules are checkpointed in place, through PyTorch's public mechanisms; `step.close()`
    undoes it, and so does leaving the step as a context. A workload on the CPU is moved to the accelerator that the
    plan was made for, where that is here: the model and the optimizer's state as by `model.to(device)`, which keeps
    their tensors' identity, and tensors that `loss_fn` holds. The step takes batches that are on the CPU.

    A plan for several ranks is applied on each of them, after `torch.distributed.init_process_group`; the step takes
    the same global batch on each. Sharded parameters stay so when the step is closed.

    Args:
        plan: A plan for this workload.
        workload: The user's workload.
        recover: Whether a step that runs out of memory is undone, and run again on the same batch under the next
            lower plan of the frontier, which then stays. Ranks that share the step do so together, whichever of them
            runs out.
        adaptive: Whether batches whose shapes vary are each run with the fastest plan that fits them. The plans are
            those on the frontier, of the plan's precision and of the numerics class that it allows;
            `Workload.batch` is the largest batch there is. With numerics="exact" the results do not depend on which
            are taken; with microbatches among them, they do to rounding. Steps that run out of memory are then always
            run again.
        limit_bytes: What a step may hold at a time, on a GPU reserve (> 0): it fails before it exceeds that. None
            sets no limit.
        snapshots: Folder for a memory snapshot of each step that runs out of memory, `out-of-memory-<step>.pickle`, at
            most 8; None for none.
        mesh: Of the ranks that share the step, all of them: of one dimension, or replicas and shards for hybrid
            sharding. None makes one of the default process group.

    Warns:
        RuntimeWarning: The step is dropped without having been called or closed.

    Raises:
        PlanMismatchError: The plan was made for another workload, or the ranks have different plans.
        BudgetError: The plan offloads activations, and the host has less memory left than they may take.
        PlanError: A plan is applied to the workload already, its levers are not legal, it cuts batches whose samples
            the loss couples, or with `adaptive` its precision is bf16-true or ranks share it.
        WorkloadError: The model is on another device than the plan's.
        UsageError: `limit_bytes` is not positive; or with `recover`, ranks that share the step have different plans, or
            what shares it can't be undone by this PyTorch.
    """
    check_launched(plan)
    if plan.levers.sharding is not None:
        from memfit.ranks import Group, is_joined  # distributed packages take a second to import

        if is_joined():  # as far as this process is one of several
            check_same(Group(find_device(plan.device).kind), "plans", ir.codec.encode(plan))
    plan, workload = without_coupled(plan, workload), placed(workload, plan)
    if limit_bytes is not None and limit_bytes < 1:
        raise UsageError(f"limit_bytes={limit_bytes} is not above 0: give a number of bytes, or None for no limit")
    check_as_given(workload)
    check_plan(plan, workload)
    if levers_bytes := host_bytes_of(plan):
        check_host(host_needs(plan, workload, levers_bytes), None)
    bare, predicted = without_switched(plan.levers, plan.batch_size), plan.predicted
    # Held against the step on a machine like this one: on the CPU, with this PyTorch.
    on_cpu = all(p.device.type == "cpu" for p in workload.model.parameters())
    is_proven = plan.is_proven and on_cpu and plan.torch_version == str(torch.__version__)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(
            applied(bare, workload, mesh=mesh, prediction=predicted, predicted_peak_bytes=predicted.peak_bytes)
        )
        switch = stack.enter_context(contextlib.closing(Switch(step, plan.levers, is_proven=is_proven)))
        place = device_of(step)
        if limit_bytes is not None:
            if on_cpu:
                check_lever_names(lever_names(LeversOn(plan.levers, plan.batch_size)) | {LIMIT})
            step.change(limit=_limit(limit_bytes, step))
        writer: Snapshots | None = None
        if snapshots is not None:
            writer = Snapshots(Path(snapshots), place, functools.partial(_write_predicted_snapshot, switch))
        recovery: Recovery | None = None
        if adaptive:
            recovery = Adaptive(switch, plan, workload, writer)
        else:
            growth = Growth(
                place,
                lambda: (plan.budget_bytes, step.options.predicted_peak_bytes or predicted.peak_bytes),
                functools.partial(step.note, "growing memory"),
                lambda: {
                    f"Workload.{name}": getattr(workload, name) for name in ("model", "loss_fn", "batches", "evaluate")
                },
            )
            step.change(admit=Admission(switch, plan, workload), after=growth.stepped)
            if recover:
                recovery = Recovery(step, plan, switch.lower, snapshots=writer)
            elif writer is not None:
                step.change(recovery=OutOfMemoryObserver(step, plan, writer))
        if recovery is not None:
            step.change(recovery=stack.enter_context(contextlib.closing(recovery)))
        step.on_close = stack.pop_all().close
    step.on_use = on_unused(step, _UNUSED).detach
    return step


def _limit(limit_bytes: int, step: Step) -> AcceleratorLimit | CpuLimit:
    named, place = functools.partial(held_tensors, step), device_of(step)
    if place.type != "cpu":
        return AcceleratorLimit(limit_bytes, named, place)
    inside = known_workspace_bytes()
    return CpuLimit(limit_bytes, named, lambda text: inside.get(text, 0), Accumulation().engine_operator)


def _write_predicted_snapshot(switch: Switch, plan: Plan, batch: Any, path: Path) -> Path:
    """Write the history of two steps on a batch under a plan, as the simulated allocator has it.

    Nothing is measured: an operator's workspace counts where it is known already, and each event takes a microsecond.
    """
    workload = dataclasses.replace(switch.step.workload, batch=batch)
    device = device_under(plan.levers, find_device(plan.device))
    with switch.lifted():
        trace = capture_levers(workload, replace(plan.levers, regions=()), device)
    known = known_workspace_bytes()
    costs = CostTable(
        device=device.name,
        torch_version=str(torch.__version__),
        threads=torch.get_num_threads(),
        ops={text: OpCost(0.0, known.get(text, 0), False) for text in trace.signatures},
        dispatch_seconds=0.0,
        checkpoint_seconds=0.0,
        selective_op_seconds=0.0,
        peak_error=0.0,
    )
    return write_snapshot(allocations(trace, costs, plan.levers.regions), device.allocator, path)

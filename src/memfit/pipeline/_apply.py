"""`memfit.apply`: the training step that runs a plan, with its limit, its recovery and its snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from memfit.capture.accumulation import Accumulation
from memfit.cost.cpu_costs import known_workspace_bytes
from memfit.errors import UsageError
from memfit.extent import covers, difference_text, extent_of
from memfit.frames import on_unused
from memfit.hardware.host import find_device
from memfit.ir import codec
from memfit.ir.allocations import allocations
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.plan import Plan
from memfit.levers import registry
from memfit.levers.compilation import LIMIT
from memfit.levers.lever import LeversOn
from memfit.levers.stack import applied, check_as_given, check_plan, host_bytes_of
from memfit.levers.switch import Switch, without_switched
from memfit.pipeline.adaptive import Adaptive
from memfit.pipeline.placement import check_launched, kind_of, placed
from memfit.pipeline.verbs import applying, checked
from memfit.planner.admission import Admission
from memfit.planner.batch_coupling import without_coupled
from memfit.planner.captures import capture_levers
from memfit.ranks.processes import check_same
from memfit.report.memory_snapshot import write_snapshot
from memfit.training.guards.host_resources import check_host, host_needs
from memfit.training.guards.limits import AcceleratorLimit, CpuLimit, device_of, held_tensors
from memfit.training.guards.loop_memory import Growth
from memfit.training.guards.recovery import OutOfMemoryObserver, Recovery, Snapshots
from memfit.training.step import Step
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
        _check_ranks(plan)
    plan, workload = without_coupled(plan, workload), placed(workload, plan)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(switchable(plan, workload, limit_bytes=limit_bytes, mesh=mesh))
        writer = snapshots_of(switch, snapshots)
        recovery: Recovery | None = None
        if adaptive:
            recovery = Adaptive(switch, plan, workload, writer)
        else:
            growth = Growth(
                device_of(switch.step),
                lambda: (plan.budget_bytes, switch.step.options.predicted_peak_bytes or plan.predicted.peak_bytes),
                functools.partial(switch.step.note, "growing memory"),
                lambda: {
                    f"Workload.{name}": getattr(workload, name) for name in ("model", "loss_fn", "batches", "evaluate")
                },
            )
            switch.step.change(admit=_admission(switch, plan, workload), after=growth.stepped)
            if recover:
                recovery = Recovery(switch.step, plan, switch.lower, snapshots=writer)
            elif writer is not None:
                switch.step.change(recovery=OutOfMemoryObserver(switch.step, plan, writer))
        if recovery is not None:
            switch.step.change(recovery=stack.enter_context(contextlib.closing(recovery)))
        switch.step.on_close = stack.pop_all().close
    switch.step.on_use = on_unused(switch.step, _UNUSED).detach
    return switch.step


def _admission(switch: Switch, plan: Plan, workload: Workload) -> Callable[[Any], None]:
    """Return what holds a plan's promise against each batch, and has the step tell what it is predicted to take."""
    step, planned = switch.step, extent_of(workload.batch)
    sharding = plan.levers.sharding
    advice = (
        f"Make the plan with Workload.batch as large as any batch ({switch.levers.microbatch_size} of"
        f" {plan.batch_size} samples are run at once), give smaller batches, or raise budget="
    )
    admission = Admission(workload, plan, lifted=switch.lifted, note=step.note, advice=advice)
    promised, seen = step.options.prediction, step.options.prediction

    def admit(batch: Any) -> None:
        nonlocal promised, seen
        extent = extent_of(batch)
        if sharding is not None:
            if not covers(planned, extent):
                raise UsageError(
                    f"a batch is larger than the plan's ({difference_text(extent, planned)}), and memfit"
                    f" can't predict its peak on each of {sharding.world_size} ranks during training."
                    f" {advice}"
                )
            return
        if step.options.prediction is not seen:  # a lower plan, after a step ran out of memory
            promised = step.options.prediction
        seen = admission(batch, switch.levers, promised or plan.predicted)
        if seen is not step.options.prediction:
            step.change(prediction=seen, predicted_peak_bytes=seen.peak_bytes)

    return admit


def _check_ranks(plan: Plan) -> None:
    """Raise PlanMismatchError unless all ranks apply one plan, as far as this process is one of several."""
    from memfit.ranks.group import Group  # distributed packages take a second to import
    from memfit.ranks.mesh import is_joined

    if is_joined():
        check_same(Group(kind_of(plan)), "plans", codec.encode(plan))


def snapshots_of(switch: Switch, folder: str | Path | None) -> Snapshots | None:
    """Return the writer of snapshots of a step into a folder; None without one."""
    if folder is None:
        return None
    return Snapshots(Path(folder), device_of(switch.step), functools.partial(_write_predicted_snapshot, switch))


def _write_predicted_snapshot(switch: Switch, plan: Plan, batch: Any, path: Path) -> Path:
    """Write the history of two steps on a batch under a plan, as the simulated allocator has it.

    Nothing is measured: an operator's workspace counts where it is known already, and each event takes a microsecond.

    Raises:
        CaptureError: The step can't be captured.
        OutputError: The file can't be written.
    """
    workload, device = dataclasses.replace(switch.step.workload, batch=batch), find_device(plan.device)
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


@contextlib.contextmanager
def switchable(
    plan: Plan, workload: Workload, *, limit_bytes: int | None, mesh: DeviceMesh | None = None
) -> Iterator[Switch]:
    """Run a plan on a workload, and what may be put in its place, until the context is left; see `apply`."""
    if limit_bytes is not None and limit_bytes < 1:
        raise UsageError(f"limit_bytes={limit_bytes} is not above 0: give a number of bytes, or None for no limit")
    check_as_given(workload)
    check_plan(plan, workload)
    levers_bytes = host_bytes_of(plan)
    if levers_bytes:
        check_host(host_needs(plan, workload, levers_bytes), None)
    bare, predicted = without_switched(plan.levers, plan.batch_size), plan.predicted
    # Held against the step on a machine like this one: on the CPU, with this PyTorch.
    on_cpu = all(p.device.type == "cpu" for p in workload.model.parameters())
    is_proven = plan.is_proven and on_cpu and plan.torch_version == str(torch.__version__)
    with (
        applied(bare, workload, mesh=mesh, prediction=predicted, predicted_peak_bytes=predicted.peak_bytes) as step,
        contextlib.closing(Switch(step, plan.levers, is_proven=is_proven)) as switch,
    ):
        if limit_bytes is not None:
            if on_cpu:
                registry.check_names(registry.names(LeversOn(plan.levers, plan.batch_size)) | {LIMIT})
            step.change(limit=_limit(limit_bytes, step))
        yield switch


def _limit(limit_bytes: int, step: Step) -> CpuLimit | AcceleratorLimit:
    """Return the limit of a step on the device of its parameters."""
    device = device_of(step)
    named = functools.partial(held_tensors, step)
    if device.type != "cpu":
        return AcceleratorLimit(limit_bytes, named, device)
    inside = known_workspace_bytes()
    return CpuLimit(limit_bytes, named, lambda text: inside.get(text, 0), Accumulation().engine_operator)

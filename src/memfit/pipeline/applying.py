"""From levers to the step that runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from memfit.apply.bf16_weights import Bf16Weights, bf16_weights
from memfit.apply.checkpoint import is_checkpointed
from memfit.apply.chunked_loss import is_chunked
from memfit.apply.in_backward import InBackward
from memfit.apply.lean import is_made_lean
from memfit.apply.offloaded_state import OffloadedState
from memfit.apply.precision import autocast, is_cast, kept_in_fp32, tf32
from memfit.apply.replaced_optimizer import replaced
from memfit.capture.accumulation import Accumulation
from memfit.cost.calibrate import known_workspace_bytes
from memfit.devices.host import find_device
from memfit.errors import PlanError, PlanMismatchError, UsageError, WorkloadError
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Plan
from memfit.pipeline.combining import check_combination
from memfit.pipeline.coupling import without_coupled
from memfit.pipeline.refusals import check_supported
from memfit.pipeline.switching import Switch, switched, without_switched
from memfit.tape import LoopWorkload
from memfit.train.host_memory import check_host, host_needs
from memfit.train.ledger import device_of, held_tensors, live
from memfit.train.limits import CpuLimit, CudaLimit
from memfit.train.loop import DescribedLoop
from memfit.train.ranks import check_can_recover
from memfit.train.recovery import Recovery, Witness
from memfit.train.scaling import LossScaler
from memfit.train.snapshots import Snapshots
from memfit.train.step import Step
from memfit.train.taped import TapedStep
from memfit.workload import Loop, Workload, fingerprint, samples_of


def apply(
    plan: Plan,
    workload: Workload,
    *,
    recover: bool = False,
    limit_bytes: int | None = None,
    snapshots: str | Path | None = None,
    process_group: ProcessGroup | None = None,
) -> Step:
    """Return the training step that runs a plan on a workload.

    The workload's modules are checkpointed in place, through PyTorch's public mechanisms; `step.close()`
    undoes it, and so does leaving the step as a context.

    Args:
        plan: A plan for this workload.
        workload: The user's workload.
        recover: Whether a step that runs out of memory is undone, and run again on the same batch under the next
            lower plan of the frontier, which then stays.
        limit_bytes: What a step may hold at a time, on a GPU reserve (> 0): it fails before it exceeds that. None
            sets no limit.
        snapshots: Folder for a memory snapshot of each step that runs out of memory, `out-of-memory-<step>.pickle`, at
            most 8; None for none.
        process_group: Ranks that train together, each with a copy of the model, its own batches and the same plan: what
            runs out of memory on one is undone on all, and gradients are averaged after the backward pass. None for
            one process.

    Raises:
        PlanMismatchError: The plan was made for another workload.
        BudgetError: The plan offloads activations, and the host has less memory left than they may take.
        PlanError: A plan is applied to the workload already, its levers are not legal, or it cuts batches whose samples
            the loss couples.
        UsageError: `limit_bytes` is not positive, `process_group` is given without `recover`, the ranks have different
            plans, or the model is one whose ranks can't recover together.
    """
    if process_group is not None and not recover:
        raise UsageError("process_group= has ranks undo steps together: give recover=True too")
    plan = without_coupled(plan, workload)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(switchable(plan, workload, limit_bytes=limit_bytes))
        writer = snapshots_of(switch, snapshots)
        if recover:
            recovery = Recovery(switch.step, plan, switch.lower, snapshots=writer)
            switch.step.recovery = stack.enter_context(contextlib.closing(recovery))
            join(recovery, process_group)
        elif writer is not None:
            switch.step.recovery = Witness(switch.step, plan, writer)
        switch.step.on_close = stack.pop_all().close
    return switch.step


def join(recovery: Recovery, process_group: ProcessGroup | None) -> None:
    """Have ranks recover together, where there are several.

    Raises:
        UsageError: They can't.
    """
    workload = recovery.step.workload
    check_can_recover(workload.model)
    if process_group is None:
        return
    if recovery.plan.levers.precision == "bf16-true" and workload.bf16_updates == "stochastic-rounding":
        raise UsageError(
            "process_group= with Workload.bf16_updates='stochastic-rounding': each rank would round otherwise, and the"
            " weights drift apart; give bf16_updates='master-weights'"
        )
    recovery.join(process_group)


def snapshots_of(switch: Switch, folder: str | Path | None) -> Snapshots | None:
    """Return what writes snapshots of a step into a folder; None without one."""
    from memfit.pipeline.snapshotting import write_predicted_snapshot  # which itself applies plans

    if folder is None:
        return None
    return Snapshots(Path(folder), device_of(switch.step), functools.partial(write_predicted_snapshot, switch))


@contextlib.contextmanager
def switchable(plan: Plan, workload: Workload, *, limit_bytes: int | None) -> Iterator[Switch]:
    """Run a plan on a workload, and what may be put in its place, until the context is left; see `apply`."""
    if limit_bytes is not None and limit_bytes < 1:
        raise UsageError(f"limit_bytes={limit_bytes} is not above 0: give a number of bytes, or None for no limit")
    check_supported(workload)
    check_plan(plan, workload)
    if any(region.offload for region in plan.levers.regions):
        check_host(host_needs(plan, workload), None)
    bare = without_switched(plan.levers)
    with (
        applied(bare, workload, predicted_peak_bytes=plan.predicted.peak_bytes) as step,
        contextlib.closing(Switch(step, plan.levers, is_proven=_is_proven(plan, workload))) as switch,
        live(step),
    ):
        step.prediction = plan.predicted
        step.limit = None if limit_bytes is None else _limit(limit_bytes, step)
        yield switch


def _is_proven(plan: Plan, workload: Workload) -> bool:
    """Tell whether a plan was held against the step on a machine like this one: on the CPU, with this PyTorch."""
    on_cpu = all(p.device.type == "cpu" for p in workload.model.parameters())
    return plan.is_proven and on_cpu and plan.torch_version == str(torch.__version__)


def _limit(limit_bytes: int, step: Step) -> CpuLimit | CudaLimit:
    """Return what limits a step on the device of its parameters."""
    device = device_of(step)
    named = functools.partial(held_tensors, step)
    if device.type == "cuda":
        return CudaLimit(limit_bytes, named, device)
    inside = known_workspace_bytes()
    return CpuLimit(limit_bytes, named, lambda text: inside.get(text, 0), Accumulation().as_the_engine)


@contextlib.contextmanager
def applied(levers: Levers, workload: Workload, *, predicted_peak_bytes: int | None = None) -> Iterator[Step]:
    """Run levers on a workload, on the device of its parameters, until the context is left."""
    device = next((p.device.type for p in workload.model.parameters()), "cpu")
    precision, mixed = levers.precision, levers.precision in ("bf16-mixed", "16-mixed")
    check_combination(levers, workload)
    with (
        _weights(levers, workload, device) as weights,
        _optimizer(levers, workload) as optimizer,
        switched(workload.model, levers),
    ):
        casts = functools.partial(autocast, precision, device) if mixed else None
        if isinstance(optimizer.workload, LoopWorkload) and optimizer.workload.tape.entries:
            yield TapedStep(optimizer.workload, casts)
            return
        yield Step(
            optimizer.workload,
            microbatch_size=levers.microbatch_size,
            autocast=casts,
            around=tf32 if precision == "tf32" else None,
            scaler=LossScaler(workload.loss_scaling) if precision == "16-mixed" else None,
            update=weights.update if weights else optimizer.update,
            in_backward=optimizer.in_backward,
            masters=weights.masters if weights else None,
            predicted_peak_bytes=predicted_peak_bytes,
        )


@contextlib.contextmanager
def described(levers: Levers, workload: Workload) -> Iterator[DescribedLoop]:
    """Run the user's own loop, as `Workload.loop` says, until the context is left."""
    loop = workload.loop or Loop()
    with applied(levers, workload) as step:
        program = DescribedLoop(step, loop)
        with program.holding():
            yield program


@contextlib.contextmanager
def _weights(levers: Levers, workload: Workload, device: str) -> Iterator[Bf16Weights | None]:
    """Have the model's weights, and the modules that are to stay in fp32, as the precision asks."""
    if levers.precision == "bf16-true":
        with bf16_weights(workload, accumulates=levers.microbatch_size < samples_of(workload)) as weights:
            yield weights
    else:
        mixed = levers.precision in ("bf16-mixed", "16-mixed")
        with kept_in_fp32(workload.model, workload.fp32_modules, device) if mixed else contextlib.nullcontext():
            yield None


class _Optimizer(NamedTuple):
    """How a step updates the parameters: its workload, with the optimizer, and what `Step` takes."""

    workload: Workload
    update: Callable[[], object] | None = None
    in_backward: InBackward | None = None


@contextlib.contextmanager
def _optimizer(levers: Levers, workload: Workload) -> Iterator[_Optimizer]:
    """Have the parameters updated as the plan says: by another optimizer, in the backward pass, or one by one."""
    if levers.optimizer == "as-is":
        yield _Optimizer(workload)
    elif levers.optimizer == "in-backward":
        with contextlib.closing(InBackward(workload.optimizer)) as updating:
            yield _Optimizer(workload, in_backward=updating)
    elif levers.optimizer == "offloaded":
        with contextlib.closing(OffloadedState(workload.optimizer)) as state:
            yield _Optimizer(workload, update=state.step)
    else:
        with replaced(workload.optimizer, levers.optimizer) as optimizer:
            yield _Optimizer(dataclasses.replace(workload, optimizer=optimizer))


def check_plan(plan: Plan, workload: Workload) -> None:
    """Check that a plan is for a workload.

    Raises:
        PlanMismatchError: It was made for another one.
        PlanError: Its microbatch size is not one, or its levers don't go together.
    """
    found = fingerprint(workload)
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for the workload {plan.workload!r} with fingerprint {plan.fingerprint}, but"
            f" {workload.name!r} has {found}: modules, parameters, batch shapes or optimizer differ. Make a plan for it"
        )
    size = samples_of(workload)
    if not 1 <= plan.levers.microbatch_size <= size:
        raise PlanError(
            f"the plan's levers.microbatch_size is {plan.levers.microbatch_size}: it must be from 1 to the batch's"
            f" {size} samples"
        )
    check_combination(plan.levers, workload, allowed=plan.allowed)


def check_workload(workload: Workload, device: Device) -> None:
    """Check that a workload is as the user made it, and where it can be predicted for a device.

    Raises:
        PlanError: A plan is applied to it.
        WorkloadError: Its model is elsewhere, or of a kind that can't be run.
    """
    check_supported(workload)
    elsewhere = {p.device.type for p in workload.model.parameters()} - {"cpu", "meta", device.kind}
    if elsewhere:
        raise WorkloadError(
            f"Workload.model is on {', '.join(sorted(elsewhere))}, which device={device.name!r} is not: build it on"
            ' the CPU or under torch.device("meta")'
        )
    if any(is_on(workload.model) for is_on in (is_checkpointed, is_cast, is_chunked, is_made_lean)):
        raise PlanError("a plan is applied to Workload.model already: call close() on its step first")


def check_runs_here(plan: Plan, workload: Workload) -> Device:
    """Check that a plan is for a workload, and that this version can run and measure both here; return the device.

    Raises:
        PlanMismatchError: The plan was made for another workload.
        PlanError: It was made for another device, or a plan is applied to the workload.
        WorkloadError: The model is not on the CPU, or holds no data.
    """
    device = find_device("cpu")
    if plan.device != device.name:
        raise PlanError(
            f"the plan was made for device={plan.device!r}: this version runs and measures plans on the CPU only. Make"
            " one with device='cpu', or apply this one there with memfit.apply(plan, workload)"
        )
    if any(p.device.type == "meta" for p in workload.model.parameters()):
        raise WorkloadError("Workload.model holds no data: it was built under torch.device('meta'); build it without")
    check_workload(workload, device)
    check_plan(plan, workload)
    return device

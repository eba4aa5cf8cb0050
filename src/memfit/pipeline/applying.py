"""From levers to the step that runs them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.apply.checkpoint import checkpointed, is_checkpointed
from memfit.apply.precision import autocast
from memfit.devices.host import find_device
from memfit.errors import PlanError, PlanMismatchError, WorkloadError
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Plan
from memfit.pipeline.switching import Switch
from memfit.train.recovery import Recovery
from memfit.train.scaling import LossScaler
from memfit.train.step import Step
from memfit.workload import Workload, batch_size_of, fingerprint


def apply(plan: Plan, workload: Workload, *, recover: bool = False) -> Step:
    """Return the training step that runs a plan on a workload.

    The workload's modules are checkpointed in place, through PyTorch's public mechanisms; `step.close()`
    undoes it, and so does leaving the step as a context.

    Args:
        plan: A plan for this workload.
        workload: The user's workload.
        recover: Whether a step that runs out of memory is undone, and run again on the same batch under the next
            lower plan of the frontier, which then stays.

    Raises:
        PlanMismatchError: The plan was made for another workload.
        PlanError: A plan is applied to the workload already, or its levers are not legal.
    """
    check_plan(plan, workload)
    bare, peak_bytes = replace(plan.levers, regions=()), plan.predicted.peak_bytes
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(applied(bare, workload, predicted_peak_bytes=peak_bytes))
        switch = stack.enter_context(contextlib.closing(Switch(step, plan.levers)))
        if recover:
            step.recovery = stack.enter_context(contextlib.closing(Recovery(step, plan, switch.lower)))
        step.on_close = stack.pop_all().close
    return step


@contextlib.contextmanager
def applied(levers: Levers, workload: Workload, *, predicted_peak_bytes: int | None = None) -> Iterator[Step]:
    """Run levers on a workload, on the device of its parameters, until the context is left."""
    device = next((p.device.type for p in workload.model.parameters()), "cpu")
    with checkpointed(workload.model, levers.regions):
        yield Step(
            workload,
            microbatch_size=levers.microbatch_size,
            autocast=functools.partial(autocast, levers.precision, device),
            scaler=LossScaler(workload.loss_scaling) if levers.precision == "16-mixed" else None,
            predicted_peak_bytes=predicted_peak_bytes,
        )


def check_plan(plan: Plan, workload: Workload) -> None:
    """Check that a plan is for a workload.

    Raises:
        PlanMismatchError: It was made for another one.
        PlanError: Its microbatch size is not one.
    """
    found = fingerprint(workload)
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for the workload {plan.workload!r} with fingerprint {plan.fingerprint}, but"
            f" {workload.name!r} has {found}: modules, parameters, batch shapes or optimizer differ. Make a plan for it"
        )
    size = batch_size_of(workload.batch)
    if not 1 <= plan.levers.microbatch_size <= size:
        raise PlanError(
            f"the plan's levers.microbatch_size is {plan.levers.microbatch_size}: it must be from 1 to the batch's"
            f" {size} samples"
        )


def check_workload(workload: Workload, device: Device) -> None:
    """Check that a workload is as the user made it, and where it can be predicted for a device.

    Raises:
        PlanError: A plan is applied to it.
        WorkloadError: Its model is elsewhere.
    """
    elsewhere = {p.device.type for p in workload.model.parameters()} - {"cpu", "meta", device.kind}
    if elsewhere:
        raise WorkloadError(
            f"Workload.model is on {', '.join(sorted(elsewhere))}, which device={device.name!r} is not: build it on"
            ' the CPU or under torch.device("meta")'
        )
    if is_checkpointed(workload.model):
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

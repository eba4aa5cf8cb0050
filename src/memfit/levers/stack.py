"""From levers to the step that runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from memfit.capture import real_copy
from memfit.errors import PlanError, PlanMismatchError, WorkloadError
from memfit.ir import Device, Levers, Plan
from memfit.levers import registry
from memfit.levers.lever import LeversOn, Running
from memfit.levers.microbatches import microbatch_size_of
from memfit.recomputation import foreign_generators, preserved
from memfit.training import Step, StepOptions, check_supported, in_order_of
from memfit.workload import Loop, LoopWorkload, Workload, fingerprint, generators_of, samples_of

if TYPE_CHECKING:  # distributed packages take a second to import
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def applied(
    levers: Levers, workload: Workload, *, mesh: DeviceMesh | None = None, is_part: bool = False, **options: Any
) -> Iterator[Step]:
    """Run levers on a workload, on the device of its parameters, until the context is left.

    Args:
        mesh: Of the ranks that share the step; None for those of the default process group.
        is_part: Whether the workload's batch is one rank's part.
        options: More `StepOptions`.
    """
    registry.check_combination(levers, workload)
    running = Running(
        workload, StepOptions(microbatch_size=microbatch_size_of(levers, workload), **options), mesh, is_part
    )
    with contextlib.ExitStack() as stack:
        for lever in registry.used_levers(LeversOn(levers, samples_of(workload))):
            running = stack.enter_context(lever.apply(levers, running))
        if isinstance(running.workload, LoopWorkload) and running.workload.tape.entries:
            yield Step(running.workload, autocast=running.options.autocast)  # all else is the loop's own
        else:
            yield Step(running.workload, running.options)


@contextlib.contextmanager
def applied_to_copy(levers: Levers, workload: Workload, place: torch.device | None = None) -> Iterator[Step]:
    """Run levers on a copy of a workload, with its data, until the context is left.

    The random generators that it draws from are set back then, but for PyTorch's global one.

    Args:
        place: The device of the copy; None for the workload's own.
    """
    copied = real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))  # those in globals are no part of the copy
    with preserved(held), applied(levers, copied) as step:
        yield step


@contextlib.contextmanager
def described_loop(levers: Levers, workload: Workload) -> Iterator[Step]:
    """Run the user's own loop, as `Workload.loop` says, until the context is left."""
    with applied(levers, workload) as step, in_order_of(workload.loop or Loop(), step):
        yield step


def check_plan(plan: Plan, workload: Workload) -> None:
    """Check that a plan is for a workload.

    Raises:
        PlanMismatchError: It was made for another one.
        PlanError: Its microbatch size is not one, or its levers don't go together.
    """
    found = fingerprint(workload)
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan is for the workload {plan.workload!r} with fingerprint {plan.fingerprint}; the workload"
            f" {workload.name!r} has {found}: modules, parameters, batch shapes or optimizer differ. Make a plan for"
            " this workload"
        )
    size = samples_of(workload)
    if not 1 <= plan.levers.microbatch_size <= size:
        raise PlanError(
            f"the plan's levers.microbatch_size is {plan.levers.microbatch_size}: it must be from 1 to the batch's"
            f" {size} samples"
        )
    registry.check_combination(plan.levers, workload, allowed=plan.allowed)


def check_workload(workload: Workload, device: Device) -> None:
    """Check that a workload is as the user made it, and where it can be predicted for a device.

    Raises:
        PlanError: A plan is applied to it.
        WorkloadError: Its model is elsewhere, or of a kind that can't be run.
    """
    check_as_given(workload)
    elsewhere = {p.device.type for p in workload.model.parameters()} - {"cpu", "meta", device.kind}
    if elsewhere:
        raise WorkloadError(
            f"Workload.model is on {', '.join(sorted(elsewhere))}, not on device={device.name!r}: build it on the CPU"
            ' or under torch.device("meta")'
        )


def check_as_given(workload: Workload) -> None:
    """Check that a workload is as the user made it, and that its model and optimizer can be copied and stepped.

    Raises:
        PlanError: A plan is applied to it.
        WorkloadError: Its model or optimizer is of a kind that can't be run, or they don't belong together.
    """
    check_untouched(workload)  # first: a lever may have put other parameters into the optimizer
    check_supported(workload)


def host_bytes_of(plan: Plan) -> dict[str, int]:
    """Return the host memory that a plan's levers take, by their names."""
    state_bytes = plan.plain.by_category.get("optimizer state", 0)
    return registry.lever_host_bytes(plan.levers, state_bytes, plan.host_budget_bytes)


def check_untouched(workload: Workload) -> None:
    """Check that no plan is applied to a workload.

    Raises:
        PlanError: One is.
    """
    applied = [lever.name for lever in registry.LEVERS if lever.is_applied(workload)]
    if applied:
        raise PlanError(
            f"a plan is applied to the workload already ({', '.join(applied)}): call close() on its step first"
        )

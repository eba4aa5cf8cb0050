"""From levers to the step that runs them, and from one plan to a lower one while a step stays the same object."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import nn

from memfit.capture import real_copy
from memfit.errors import PlanError, PlanMismatchError, WorkloadError
from memfit.foundations import format_bytes
from memfit.ir import Candidate, Device, Levers, Plan, allows, at_point
from memfit.levers import registry
from memfit.levers.lever import LeversOn, Running
from memfit.levers.microbatches import microbatch_size_of
from memfit.recomputation import checking, foreign_generators, preserved
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
    applied = [lever.name for lever in registry.LEVERS if lever.is_applied(workload)]
    if applied:  # told first: a lever may have put other parameters into the optimizer
        raise PlanError(
            f"a plan is applied to the workload already ({', '.join(applied)}): call close() on its step first"
        )
    check_supported(workload)


def host_bytes_of(plan: Plan) -> dict[str, int]:
    """Return the host memory that a plan's levers take, by their names."""
    state_bytes = plan.plain.by_category.get("optimizer state", 0)
    return registry.lever_host_bytes(plan.levers, state_bytes, plan.host_budget_bytes)


@contextlib.contextmanager
def switched(model: nn.Module, levers: Levers) -> Iterator[None]:
    """Put on a model the levers that may change between two steps, until the context is left."""
    with contextlib.ExitStack() as stack:
        for lever in registry.used_whole(levers):
            if lever.switches(levers):
                stack.enter_context(lever.on_model(levers, model))
        yield


class Switch:
    """Puts a step under the levers that `switched` knows, cuts its batches, and can do so otherwise between two steps.

    Args:
        step: The step, to whose model none of these is applied.
        levers: What it begins with. The precision is not switched.
        is_proven: Whether what these recompute was held against the step before. The first step under levers of which
            it was not does so, by checksums (`memfit.recomputation.checking`).

    Raises:
        PlanError: The regions are not legal.
    """

    def __init__(self, step: Step, levers: Levers, *, is_proven: bool = False) -> None:
        self.step = step
        self._proven = {levers} if is_proven else set[Levers]()
        self._stack = contextlib.ExitStack()
        self.levers = registry.without_switched(levers, samples_of(self.step.workload))
        self.to(levers)

    def to(self, levers: Levers) -> None:
        """Put the step under other levers."""
        if replace(levers, microbatch_size=1) != replace(self.levers, microbatch_size=1):
            self._stack.close()
            self._stack.enter_context(switched(self.step.workload.model, levers))
        self.levers = levers
        needs_proof = registry.recomputes(levers) and levers not in self._proven
        proving = functools.partial(self._proving, levers) if needs_proof else None
        self.step.change(microbatch_size=microbatch_size_of(levers, self.step.workload), proving=proving)

    @contextlib.contextmanager
    def _proving(self, levers: Levers) -> Iterator[None]:
        """Hold what is recomputed against what was computed before; where all is the same, do so no more."""
        with checking():
            yield
        self._proven.add(levers)
        if self.levers == levers:
            self.step.change(proving=None)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave model and optimizer as the user made them, until the context is left; not weights that are in bf16."""
        levers = self.levers
        self.to(registry.without_switched(levers, samples_of(self.step.workload)))
        try:
            with contextlib.ExitStack() as stack:
                for lever in registry.LEVERS:
                    stack.enter_context(lever.lifted(self.step.workload))
                yield
        finally:
            self.to(levers)

    def lower(self, plan: Plan) -> Plan | None:
        """Put the step under the plan after one on its frontier, and return that; None where there is none."""
        candidates = lower_candidates(plan)
        if not candidates:
            return None
        found = lowered(plan, candidates[0])
        self.to(found.levers)
        self.step.change(predicted_peak_bytes=found.predicted.peak_bytes, prediction=found.predicted)
        return found

    def close(self) -> None:
        """Undo what was done to the model."""
        self._stack.close()


def candidates_of(plan: Plan) -> list[Candidate]:
    """Return the points of a plan's frontier that may take its place while it trains, those of most memory first.

    Their levers that a training keeps, as its precision and its optimizer, are the plan's, and their numerics class is
    one that the user allowed.
    """

    on = LeversOn(plan.levers, plan.batch_size)

    def may_follow(point: Candidate) -> bool:
        return all(lever.may_switch(on, point.levers) for lever in registry.LEVERS)

    points = [c for c in plan.frontier if allows(plan.allowed, c.numerics) and may_follow(c)]
    return sorted(points, key=lambda c: -c.peak_bytes)


def lower_candidates(plan: Plan) -> list[Candidate]:
    """Return the candidates that take less memory than the plan, the one next to it first."""
    own = next((c.peak_bytes for c in plan.frontier if c.levers == plan.levers), plan.predicted.peak_bytes)
    return [c for c in candidates_of(plan) if c.peak_bytes < own]


def lowered(plan: Plan, candidate: Candidate) -> Plan:
    """Return the plan that runs a point of a plan's frontier. What it predicts is the solver's prediction."""
    note = (
        f"from the frontier of the plan of {format_bytes(plan.predicted.peak_bytes)}, after that plan ran out of memory"
    )
    return at_point(plan, candidate, note)

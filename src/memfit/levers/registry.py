"""The registry: every lever, in the order in which they are applied and searched, and what each does not go with.

From levers, here, to the step that runs them, and from one plan to a lower one while a step stays the same object.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import nn

from memfit._torch import BatchNormBase, step_hooks, tensor_hooks
from memfit.capture import is_compiled, real_copy
from memfit.errors import PlanError, PlanMismatchError, WorkloadError
from memfit.foundations import format_bytes
from memfit.ir import Candidate, Device, Levers, LeverUse, Numerics, Plan, allows, at_point
from memfit.levers.adamw_4bit import AdamW4bit
from memfit.levers.adamw_8bit import AdamW8bit
from memfit.levers.allocator import Allocator
from memfit.levers.checkpointing import ActivationOffload, Checkpointing, Compilation, Lean
from memfit.levers.chunked_loss import ChunkedLossLever
from memfit.levers.float8 import Float8
from memfit.levers.host_weights import HostWeightsLever
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, Rung, Running, has_link, met
from memfit.levers.microbatches import Microbatches, microbatch_size_of
from memfit.levers.own_checkpointing import OwnCheckpointing
from memfit.levers.parameter_updates import FusedOptimizer, OffloadedOptimizer, OptimizerInBackward, UpdateLever
from memfit.levers.precision import Precision
from memfit.levers.quantized_weights import QuantizedWeights
from memfit.levers.replaced_optimizer import Adafactor
from memfit.levers.shared_by_ranks import SharedByRanks
from memfit.levers.tiles import TilesLever
from memfit.recomputation import checking, foreign_generators, preserved
from memfit.training import Optimizers, Step, StepOptions, check_supported, in_order_of
from memfit.workload import Loop, LoopWorkload, Workload, fingerprint, generators_of, samples_of

if TYPE_CHECKING:  # distributed packages take a second to import
    from torch.distributed.device_mesh import DeviceMesh

_OPTIMIZERS: tuple[UpdateLever, ...] = (FusedOptimizer(), AdamW8bit(), AdamW4bit(), Adafactor())
_OFFLOADED, _IN_BACKWARD = OffloadedOptimizer(), OptimizerInBackward()
UPDATES: tuple[UpdateLever, ...] = (_IN_BACKWARD, _OPTIMIZERS[0], _OFFLOADED, *_OPTIMIZERS[1:])
"""Ways of updating the parameters, those of the lowest price first."""
LEVERS: tuple[Lever, ...] = (
    Precision(),
    *_OPTIMIZERS,  # what is updated by, then where its state is, then when
    _OFFLOADED,
    _IN_BACKWARD,
    Microbatches(),
    ChunkedLossLever(),
    TilesLever(),
    Lean(),
    QuantizedWeights(),
    Float8(),
    HostWeightsLever(),
    Checkpointing(),
    ActivationOffload(),
    SharedByRanks(),
    Compilation(),
    OwnCheckpointing(),
    Allocator(),
)
CONFLICTS: tuple[Conflict, ...] = tuple(conflict for lever in LEVERS for conflict in lever.conflicts)
"""Everything else combines."""
_ADVISED = (Precision, ChunkedLossLever, Lean, Checkpointing, Microbatches, UpdateLever, ActivationOffload)


def used_levers(on: LeversOn) -> list[Lever]:
    """Return the levers that are used."""
    return [lever for lever in LEVERS if lever.is_used(on)]


def used_whole(levers: Levers) -> list[Lever]:
    """Return the levers that are used on a batch that is not cut."""
    return used_levers(LeversOn(levers, levers.microbatch_size))


def lever_uses(on: LeversOn) -> tuple[LeverUse, ...]:
    """Return the levers that are used, in words."""
    return tuple(lever.use(on) for lever in used_levers(on))


def lever_names(on: LeversOn) -> set[str]:
    """Return the names by which conflicts know the levers that are used and their settings."""
    return {name for lever in used_levers(on) for name in lever.names(on.levers)}


def recomputes(levers: Levers) -> bool:
    """Tell whether levers have modules run again in the backward pass, which their code may do otherwise."""
    return any(lever.recomputes and lever.switches(levers) for lever in used_whole(levers))


def rounding(levers: Levers) -> list[Lever]:
    """Return the levers that have a step compute with rounded weights."""
    return [lever for lever in used_whole(levers) if lever.rounds_weights]


def compiles(levers: Levers) -> bool:
    """Tell whether code is made for a step under some levers."""
    return any(lever.compiles for lever in used_whole(levers))


def draws_otherwise(levers: Levers) -> bool:
    """Tell whether a step under some levers draws other random numbers than the plain one."""
    return any(lever.draws_otherwise for lever in used_whole(levers))


def uncompiled(levers: Levers) -> Levers:
    """Return levers with compilers left out."""
    return _without(levers, levers.microbatch_size, lambda lever: lever.compiles)


def as_captured(levers: Levers) -> Levers:
    """Return levers without those that leave a captured step as it is."""
    return _without(levers, levers.microbatch_size, lambda lever: not lever.is_captured)


def device_under(levers: Levers, device: Device) -> Device:
    """Return a device as steps run on it under some levers."""
    for lever in used_whole(levers):
        device = lever.on_device(levers, device)
    return device


def without_switched(levers: Levers, batch_size: int) -> Levers:
    """Return levers without those that `switched` puts on a model; the batch is cut as before."""
    bare = _without(levers, batch_size, lambda lever: lever.switches(levers))
    return replace(bare, microbatch_size=levers.microbatch_size)


def _without(levers: Levers, batch_size: int, leaves_out: Callable[[Lever], bool]) -> Levers:
    for lever in filter(leaves_out, LEVERS):
        levers = lever.without(LeversOn(levers, batch_size))
    return levers


def check_lever_names(used: Collection[str], allowed: Numerics = "exact", where: str = "") -> None:
    """Refuse levers, settings and circumstances that don't go together, by an error that begins with `where`.

    Raises:
        PlanError: There is a conflict.
    """
    for conflict in met(CONFLICTS, used, allowed):
        raise PlanError(
            f"{where}{conflict.one} can't be combined with {conflict.other}: {conflict.why}. What to do:"
            f" {conflict.instead}. The row in docs/reference/combinations.md: {conflict.row()}"
        )


def lever_host_bytes(levers: Levers, state_bytes: int, host_budget_bytes: int) -> dict[str, int]:
    """Return the host memory that levers take, by name; each leaves less of the budget to the next.

    Args:
        state_bytes: Of the user's optimizer.
    """
    taken: dict[str, int] = {}
    for lever in used_whole(levers):
        state_bytes = lever.state_bytes(state_bytes)
    for lever in used_whole(levers):
        left = max(0, host_budget_bytes - sum(taken.values()))
        taken[lever.name] = lever.host_bytes(levers, state_bytes, left)
    return {name: nbytes for name, nbytes in taken.items() if nbytes}


def lever_rungs() -> Iterator[tuple[str, Rung]]:
    """Yield the rungs of the ladder, in the advised order."""
    for kind in _ADVISED:
        for lever in dict.fromkeys((*UPDATES, *LEVERS)):
            if isinstance(lever, kind):
                yield from ((name, functools.partial(lever.rung, name)) for name in lever.rungs)


def conflict_table() -> str:
    """Return the table of conflicts, in Markdown."""
    heading = "| this | with that | why not | what to do |\n| --- | --- | --- | --- |"
    return "\n".join([heading, *(conflict.row() for conflict in CONFLICTS)])


def circumstances(workload: Workload, device: Device | None = None) -> set[str]:
    """Return the names by which conflicts know the circumstances of a step, on a device if there is one."""
    optimizer = workload.optimizer
    optimizers = [optimizer, *getattr(optimizer, "optimizers", [])]
    is_several = isinstance(optimizer, Optimizers)
    holds = {
        Circumstance.BATCH_NORM: any(isinstance(m, BatchNormBase) and m.training for m in workload.model.modules()),
        Circumstance.CLIPPING: workload.max_grad_norm is not None,
        Circumstance.COMPILED: is_compiled(workload),
        Circumstance.SEVERAL_OPTIMIZERS: is_several,
        Circumstance.FOREIGN_OPTIMIZER: not is_several and not type(optimizer).__module__.startswith("torch.optim"),
        Circumstance.OPTIMIZER_HOOKS: any(_is_users(hook) for each in optimizers for hook in step_hooks(each)),
        Circumstance.GRADIENT_HOOKS: any(map(has_gradient_hooks, workload.model.parameters())),
        Circumstance.NO_LINK: device is not None and not has_link(device),
    }
    common = {name for name, does in holds.items() if does}
    return common.union(*(lever.circumstances(workload, device) for lever in LEVERS))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether a user's code runs with a parameter's gradient; a model may list others than tensors as its own."""
    return isinstance(parameter, torch.Tensor) and any(
        _is_users(hook) for hooks in tensor_hooks(parameter) for hook in hooks
    )


def _is_users(hook: object) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("memfit.")


def check_combination(
    levers: Levers, workload: Workload, device: Device | None = None, *, allowed: Numerics = "changed"
) -> None:
    """Refuse levers that don't go together, or not with a workload or a device.

    Raises:
        PlanError: They are in the table of
    """
    check_lever_names(lever_names(LeversOn(levers, samples_of(workload))) | circumstances(workload, device), allowed)


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
    check_combination(levers, workload)
    running = Running(
        workload, StepOptions(microbatch_size=microbatch_size_of(levers, workload), **options), mesh, is_part
    )
    with contextlib.ExitStack() as stack:
        for lever in used_levers(LeversOn(levers, samples_of(workload))):
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
    check_combination(plan.levers, workload, allowed=plan.allowed)


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
    applied = [lever.name for lever in LEVERS if lever.is_applied(workload)]
    if applied:  # told first: a lever may have put other parameters into the optimizer
        raise PlanError(
            f"a plan is applied to the workload already ({', '.join(applied)}): call close() on its step first"
        )
    check_supported(workload)


def host_bytes_of(plan: Plan) -> dict[str, int]:
    """Return the host memory that a plan's levers take, by their names."""
    state_bytes = plan.plain.by_category.get("optimizer state", 0)
    return lever_host_bytes(plan.levers, state_bytes, plan.host_budget_bytes)


@contextlib.contextmanager
def switched(on: nn.Module | Workload, levers: Levers) -> Iterator[None]:
    """Put the levers that may change between two steps on a model, or on a workload, until the context is left."""
    with contextlib.ExitStack() as stack:
        for lever in used_whole(levers):
            if lever.switches(levers):
                put = lever.on_workload(levers, on) if isinstance(on, Workload) else lever.on_model(levers, on)
                stack.enter_context(put)
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
        self.levers = without_switched(levers, samples_of(self.step.workload))
        self.to(levers)

    def to(self, levers: Levers) -> None:
        """Put the step under other levers."""
        if replace(levers, microbatch_size=1) != replace(self.levers, microbatch_size=1):
            self._stack.close()
            self._stack.enter_context(switched(self.step.workload, levers))
        self.levers = levers
        needs_proof = recomputes(levers) and levers not in self._proven
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
        self.to(without_switched(levers, samples_of(self.step.workload)))
        try:
            with contextlib.ExitStack() as stack:
                for lever in LEVERS:
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
        return all(lever.may_switch(on, point.levers) for lever in LEVERS)

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

"""The registry: every lever, in the order in which they are applied and searched, and what each does not go with."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from memfit._torch.autograd import tensor_hooks
from memfit._torch.modules import BatchNormBase, step_hooks
from memfit.capture.step_capture import is_compiled
from memfit.errors import PlanError
from memfit.hardware.accelerators import pins_memory
from memfit.ir.device import Device
from memfit.ir.plan import Levers, LeverUse, Numerics
from memfit.levers import conflicts
from memfit.levers.checkpointing import ActivationOffload, Checkpointing
from memfit.levers.chunked_loss import ChunkedLoss
from memfit.levers.compilation import Compilation
from memfit.levers.conflicts import Conflict, met
from memfit.levers.fused_optimizer import FusedOptimizer
from memfit.levers.lean import Lean
from memfit.levers.lever import Lever, LeversOn, Rung
from memfit.levers.microbatches import Microbatches
from memfit.levers.offloaded_optimizer import OffloadedOptimizer
from memfit.levers.optimizer_in_backward import OptimizerInBackward
from memfit.levers.parameter_updates import UpdateLever
from memfit.levers.precision import Precision
from memfit.levers.replaced_optimizer import Adafactor, AdamW8bit
from memfit.levers.shared_by_ranks import SharedByRanks
from memfit.training.optimizers import Optimizers
from memfit.workload import Workload, samples_of

UPDATES: tuple[UpdateLever, ...] = (
    OptimizerInBackward(),
    FusedOptimizer(),
    OffloadedOptimizer(),
    AdamW8bit(),
    Adafactor(),
)
"""Ways of updating the parameters, those of the lowest price first."""
LEVERS: tuple[Lever, ...] = (
    Precision(),
    *UPDATES,
    Microbatches(),
    ChunkedLoss(),
    Lean(),
    Checkpointing(),
    ActivationOffload(),
    SharedByRanks(),
    Compilation(),
)
CONFLICTS: tuple[Conflict, ...] = tuple(conflict for lever in LEVERS for conflict in lever.conflicts)
"""Everything else combines."""
_ADVISED = (Precision, ChunkedLoss, Lean, Checkpointing, Microbatches, UpdateLever, ActivationOffload)


def used(on: LeversOn) -> list[Lever]:
    """Return the levers that are used."""
    return [lever for lever in LEVERS if lever.is_used(on)]


def used_whole(levers: Levers) -> list[Lever]:
    """Return the levers that are used on a batch that is not cut."""
    return used(LeversOn(levers, levers.microbatch_size))


def uses(on: LeversOn) -> tuple[LeverUse, ...]:
    """Return the levers that are used, in words."""
    return tuple(lever.use(on) for lever in used(on))


def names(on: LeversOn) -> set[str]:
    """Return the names by which conflicts know the levers that are used and their settings."""
    return {name for lever in used(on) for name in lever.names(on.levers)}


def recomputes(levers: Levers) -> bool:
    """Tell whether levers have modules run again in the backward pass, which their code may do otherwise."""
    return any(lever.recomputes and lever.switches(levers) for lever in used_whole(levers))


def compiles(levers: Levers) -> bool:
    """Tell whether code is made for a step under some levers."""
    return any(lever.compiles for lever in used_whole(levers))


def uncompiled(levers: Levers) -> Levers:
    """Return levers with compilers left out."""
    for lever in LEVERS:
        if lever.compiles:
            levers = lever.without(LeversOn(levers, levers.microbatch_size))
    return levers


def draws_otherwise(levers: Levers) -> bool:
    """Tell whether a step under some levers draws other random numbers than the plain one."""
    return any(lever.draws_otherwise for lever in used_whole(levers))


def check_names(used: Collection[str], allowed: Numerics = "exact", where: str = "") -> None:
    """Refuse levers, settings and circumstances that don't go together, by an error that begins with `where`.

    Raises:
        PlanError: There is a conflict.
    """
    for conflict in met(CONFLICTS, used, allowed):
        raise PlanError(
            f"{where}{conflict.one} can't be combined with {conflict.other}: {conflict.why}. What to do:"
            f" {conflict.instead}. The row in docs/reference/combinations.md: {conflict.row()}"
        )


def host_bytes(levers: Levers, state_bytes: int, host_budget_bytes: int) -> dict[str, int]:
    """Return the host memory that levers take, by name; each leaves less of the budget to the next."""
    taken: dict[str, int] = {}
    for lever in used_whole(levers):
        left = max(0, host_budget_bytes - sum(taken.values()))
        taken[lever.name] = lever.host_bytes(levers, state_bytes, left)
    return {name: nbytes for name, nbytes in taken.items() if nbytes}


def rungs() -> Iterator[tuple[str, Rung]]:
    """Yield the rungs of the ladder, in the advised order."""
    for kind in _ADVISED:
        for lever in LEVERS:
            if isinstance(lever, kind):
                yield from lever.rungs().items()


def table() -> str:
    """Return the table of conflicts, in Markdown."""
    heading = "| this | with that | why not | what to do |\n| --- | --- | --- | --- |"
    return "\n".join([heading, *(conflict.row() for conflict in CONFLICTS)])


def circumstances(workload: Workload, device: Device | None = None) -> set[str]:
    """Return the names by which conflicts know the circumstances of a step, on a device if there is one."""
    optimizer = workload.optimizer
    optimizers = [optimizer, *getattr(optimizer, "optimizers", [])]
    is_several = isinstance(optimizer, Optimizers)
    holds = {
        conflicts.BATCH_NORM: any(isinstance(m, BatchNormBase) and m.training for m in workload.model.modules()),
        conflicts.CLIPPING: workload.max_grad_norm is not None,
        conflicts.COMPILED: is_compiled(workload),
        conflicts.SEVERAL_OPTIMIZERS: is_several,
        conflicts.FOREIGN_OPTIMIZER: not is_several and not type(optimizer).__module__.startswith("torch.optim"),
        conflicts.OPTIMIZER_HOOKS: any(_is_users(hook) for each in optimizers for hook in step_hooks(each)),
        conflicts.GRADIENT_HOOKS: any(map(has_gradient_hooks, workload.model.parameters())),
        conflicts.NO_LINK: device is not None and not _has_link(device),
    }
    common = {name for name, does in holds.items() if does}
    return common.union(*(lever.circumstances(workload, device) for lever in LEVERS))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether a user's code runs with a parameter's gradient; a model may list others than tensors as its own."""
    return isinstance(parameter, torch.Tensor) and any(
        _is_users(hook) for hooks in tensor_hooks(parameter) for hook in hooks
    )


def _is_users(hook: object) -> bool:
    """Tell whether a hook is a user's own."""
    return not str(getattr(hook, "__module__", "")).startswith("memfit.")


def _has_link(device: Device) -> bool:
    """Tell whether copies between a device and the host run beside its work, at a rate that is known or measured."""
    if device.is_here:
        return pins_memory(device.kind)
    return device.kind != "cpu" and device.link_bytes_per_second > 0


def check_combination(
    levers: Levers, workload: Workload, device: Device | None = None, *, allowed: Numerics = "changed"
) -> None:
    """Refuse levers that don't go together, or not with a workload or a device.

    Raises:
        PlanError: They are in the table of conflicts.
    """
    check_names(names(LeversOn(levers, samples_of(workload))) | circumstances(workload, device), allowed)

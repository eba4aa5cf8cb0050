"""The registry: every lever, in the order in which they are applied and searched, and what each does not go with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from msgspec.structs import replace

from memfit._torch import BatchNormBase, step_hooks, tensor_hooks
from memfit.capture import is_compiled
from memfit.errors import PlanError
from memfit.hardware import pins_memory
from memfit.ir import Device, Levers, LeverUse, Numerics
from memfit.levers.checkpointing import ActivationOffload, Checkpointing, Lean
from memfit.levers.chunked_loss import ChunkedLossLever
from memfit.levers.compilation import Compilation
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, Rung, met
from memfit.levers.microbatches import Microbatches
from memfit.levers.optimizer_in_backward import OptimizerInBackward
from memfit.levers.parameter_updates import FusedOptimizer, OffloadedOptimizer, UpdateLever
from memfit.levers.precision import Precision
from memfit.levers.replaced_optimizer import Adafactor, AdamW8bit
from memfit.levers.shared_by_ranks import SharedByRanks
from memfit.training import Optimizers
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
    ChunkedLossLever(),
    Lean(),
    Checkpointing(),
    ActivationOffload(),
    SharedByRanks(),
    Compilation(),
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


def compiles(levers: Levers) -> bool:
    """Tell whether code is made for a step under some levers."""
    return any(lever.compiles for lever in used_whole(levers))


def draws_otherwise(levers: Levers) -> bool:
    """Tell whether a step under some levers draws other random numbers than the plain one."""
    return any(lever.draws_otherwise for lever in used_whole(levers))


def uncompiled(levers: Levers) -> Levers:
    """Return levers with compilers left out."""
    return _without(levers, levers.microbatch_size, lambda lever: lever.compiles)


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
    """Return the host memory that levers take, by name; each leaves less of the budget to the next."""
    taken: dict[str, int] = {}
    for lever in used_whole(levers):
        left = max(0, host_budget_bytes - sum(taken.values()))
        taken[lever.name] = lever.host_bytes(levers, state_bytes, left)
    return {name: nbytes for name, nbytes in taken.items() if nbytes}


def lever_rungs() -> Iterator[tuple[str, Rung]]:
    """Yield the rungs of the ladder, in the advised order."""
    for kind in _ADVISED:
        for lever in LEVERS:
            if isinstance(lever, kind):
                yield from lever.rungs().items()


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
        Circumstance.NO_LINK: device is not None and not _has_link(device),
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
        PlanError: They are in the table of
    """
    check_lever_names(lever_names(LeversOn(levers, samples_of(workload))) | circumstances(workload, device), allowed)

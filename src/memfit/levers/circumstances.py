"""Circumstances of a step, which levers may conflict with: of its workload and its device."""

from __future__ import annotations

import torch

from memfit._torch.autograd import tensor_hooks
from memfit._torch.modules import BatchNormBase
from memfit._torch.optim import step_hooks
from memfit.capture.step_capture import is_compiled
from memfit.hardware.accelerators import pins_memory
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Numerics
from memfit.levers import conflicts, registry
from memfit.levers.lever import LeversOn
from memfit.training.optimizers import Optimizers
from memfit.workload import Workload, samples_of


def circumstances(workload: Workload, device: Device | None = None) -> set[str]:
    """Return the names by which conflicts know the circumstances of a step, on a device if there is one."""
    optimizer = workload.optimizer
    is_several = isinstance(optimizer, Optimizers)
    holds = {
        conflicts.BATCH_NORM: any(isinstance(m, BatchNormBase) and m.training for m in workload.model.modules()),
        conflicts.CLIPPING: workload.max_grad_norm is not None,
        conflicts.COMPILED: is_compiled(workload),
        conflicts.SEVERAL_OPTIMIZERS: is_several,
        conflicts.FOREIGN_OPTIMIZER: not is_several and not type(optimizer).__module__.startswith("torch.optim"),
        conflicts.OPTIMIZER_HOOKS: any(map(_has_hooks, [optimizer, *getattr(optimizer, "optimizers", [])])),
        conflicts.GRADIENT_HOOKS: any(map(has_gradient_hooks, workload.model.parameters())),
        conflicts.NO_LINK: device is not None and not _has_link(device),
    }
    common = {name for name, does in holds.items() if does}
    return common.union(*(lever.circumstances(workload, device) for lever in registry.LEVERS))


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a user's code runs with an optimizer's steps."""
    return any(map(_is_users, step_hooks(optimizer)))


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
        PlanError: They are in the table of conflicts.
    """
    used = registry.names(LeversOn(levers, samples_of(workload)))
    registry.check_names(used | circumstances(workload, device), allowed)

"""What the table of combinations needs to know of a workload and a device."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from memfit.capture.step import is_compiled
from memfit.devices.advice import supports_tf32
from memfit.ir import combinations
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Numerics
from memfit.train.optimizers import Optimizers
from memfit.workload import Workload, samples_of


def circumstances(workload: Workload, device: Device | None = None) -> set[str]:
    """Return what the table calls the circumstances of a step, on a device if there is one."""
    optimizer = workload.optimizer
    several = isinstance(optimizer, Optimizers)
    found = {
        combinations.BATCH_NORM: _couples_batch(workload.model),
        combinations.CLIPPING: workload.max_grad_norm is not None,
        combinations.COMPILED: is_compiled(workload),
        combinations.NO_UPDATES: workload.bf16_updates is None,
        combinations.SEVERAL_OPTIMIZERS: several,
        combinations.FOREIGN_OPTIMIZER: not several and not type(optimizer).__module__.startswith("torch.optim"),
        combinations.NOT_ADAMW: not _is_adamw(optimizer),
        combinations.NO_BITSANDBYTES: importlib.util.find_spec("bitsandbytes") is None,
        combinations.NO_TF32: device is not None and not supports_tf32(device),
        combinations.NO_LINK: device is not None
        and not (device.kind == "cuda" and device.link_bytes_per_second is not None),
    }
    return {name for name, holds in found.items() if holds}


def check_combination(
    levers: Levers, workload: Workload, device: Device | None = None, *, allowed: Numerics = "changed"
) -> None:
    """Refuse levers that don't go together, or not with a workload or a device.

    Args:
        levers: The levers.
        workload: The workload.
        device: Where they are to run; None for any.
        allowed: The numerics class that the user allows.

    Raises:
        PlanError: They are in the table of combinations.
    """
    used = combinations.names_of(levers, samples_of(workload))
    combinations.check(used | circumstances(workload, device), allowed)


def _is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer does AdamW's mathematics: Adam with decoupled weight decay, or with none."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["amsgrad"]
        or group["maximize"]
        or (group["weight_decay"] and not (group.get("decoupled_weight_decay") or type(optimizer) is torch.optim.AdamW))
        for group in optimizer.param_groups
    )


def _couples_batch(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())

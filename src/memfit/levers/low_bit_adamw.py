"""The base of optimizers that do AdamW's mathematics with states of fewer bits.

A kernel that holds the states of a whole parameter in fp32 needs several times its size, and the largest parameter may
be a tenth of a model. So a parameter is updated a piece at a time where its kernel has such temporaries: states are
quantised by blocks, which pieces don't cut, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memfit.ir import Device
from memfit.levers.lever import Circumstance, Conflict
from memfit.levers.parameter_updates import update_conflicts
from memfit.levers.replaced_optimizer import BF16_UPDATES, HOOKS, ReplacedOptimizer
from memfit.workload import Workload

NOT_ADAMW = "an optimizer other than AdamW, or Adam without weight decay"
LEAST_NUMBERS = 4096
"""A tensor of fewer numbers keeps states of 32 bits."""
_LEAST_ON_CPU, _LEAST = 2**16, 2**24  # numbers of a piece: kernels of accelerators take microseconds each to launch
_MOST_PIECES = 32  # of a parameter: each is some twenty operators
_BLOCKS = 256  # numbers: pieces cut no block of so many


class LowBitAdamW(ReplacedOptimizer):
    """AdamW with states of fewer bits. States that are there are quantised, and given back at the end."""

    numerics_class = "reduced"

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        return set() if _is_adamw(workload.optimizer) else {NOT_ADAMW}

    def converted(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": float(group["lr"]), **{name: group[name] for name in ("betas", "eps", "weight_decay")}}


def adamw_conflicts(name: str, *own: Conflict) -> tuple[Conflict, ...]:
    """Return the conflicts of an AdamW with states of fewer bits: those that all have, and its own."""
    return update_conflicts(
        name,
        {"bf16-true": BF16_UPDATES, Circumstance.OPTIMIZER_HOOKS: HOOKS},
        Conflict(
            name,
            NOT_ADAMW,
            "it computes AdamW's update only, without amsgrad and maximize",
            "use torch.optim.AdamW, or set levers.optimizer to 'as-is'",
        ),
        *own,
    )


def pieces(parameter: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number, exclusive, of each piece that a parameter is updated by."""
    count, least = parameter.numel(), _LEAST_ON_CPU if parameter.device.type == "cpu" else _LEAST
    size = max(least, -(-count // (_MOST_PIECES * _BLOCKS)) * _BLOCKS)
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer does AdamW's mathematics: Adam with decoupled weight decay, or with none."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["amsgrad"]
        or group["maximize"]
        or (group["weight_decay"] and not (group.get("decoupled_weight_decay") or type(optimizer) is torch.optim.AdamW))
        for group in optimizer.param_groups
    )

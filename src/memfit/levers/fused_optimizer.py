"""The optimizer's fused step: one kernel updates all, and makes no temporary tensors of the parameters' size.

`torch.optim.Adam`, `AdamW`, `Adagrad` and `SGD` have one (`fused=True`), which rounds otherwise than the operators that
it stands for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memfit.ir import Device, Trace
from memfit.levers.conflicts import Conflict
from memfit.levers.lever import Running
from memfit.levers.parameter_updates import UpdateLever, temporary_bytes, update_conflicts
from memfit.workload import Workload

FUSED = "fused optimizer"
NO_FUSED = "an optimizer without a fused step, or fused already"
_ON = {"fused": True, "foreach": False}
_SETTINGS = tuple(_ON)
_SWITCHED_ON = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]()
"""What the groups of optimizers had before memfit switched their fused steps on."""
_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


class FusedOptimizer(UpdateLever):
    """The user's own optimizer, with its fused step."""

    name = FUSED
    value = "fused"
    numerics_class = "reordered"
    conflicts = update_conflicts(
        FUSED,
        {},
        Conflict(
            FUSED,
            NO_FUSED,
            "memfit has nothing to switch on",
            "use torch.optim's Adam, AdamW, Adagrad or SGD, or set levers.optimizer to 'as-is'",
        ),
        Conflict(
            FUSED,
            "bf16-true",
            "bf16 weights have their own update",
            "use 'bf16-mixed', or give the optimizer fused=True",
        ),
    )

    def circumstances(self, workload: Workload, device: Device | None) -> set[str]:
        optimizer = workload.optimizer
        is_on = any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
        return set() if type(optimizer) in _KINDS and not is_on else {NO_FUSED}

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        optimizer = running.workload.optimizer
        before = [{name: group[name] for name in _SETTINGS} for group in optimizer.param_groups]
        _set(optimizer, [dict(_ON)] * len(before), on_device=True)
        _SWITCHED_ON[optimizer] = before
        try:
            yield running
        finally:
            del _SWITCHED_ON[optimizer]
            _set(optimizer, before, on_device=False)

    @contextlib.contextmanager
    def lifted(self, workload: Workload) -> Iterator[None]:
        optimizer = workload.optimizer
        before = _SWITCHED_ON.get(optimizer)
        if before is None:
            yield
            return
        _set(optimizer, before, on_device=False)
        try:
            yield
        finally:
            _set(optimizer, [dict(_ON)] * len(before), on_device=True)

    def most_saved_bytes(self, trace: Trace) -> int:
        return temporary_bytes(trace)


def _set(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]], *, on_device: bool) -> None:
    """Give each group its settings, and have the counts of steps where they are read then."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    _place_counts(optimizer, on_device)


def _place_counts(optimizer: torch.optim.Optimizer, on_device: bool) -> None:
    """Move the counts of steps to where a fused step reads them, or back to the CPU, where others do."""
    for parameter, values in optimizer.state.items():
        count: Any = values.get("step")
        if isinstance(count, torch.Tensor):
            values["step"] = count.to(parameter.device if on_device else "cpu", torch.float32)

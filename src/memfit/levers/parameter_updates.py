"""Ways of updating the parameters: the base of the levers that `Levers.optimizer` sets."""

from __future__ import annotations

import abc
import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec
import torch

from memfit.errors import PlanError
from memfit.ir import Levers, OptimizerLever, Trace
from memfit.levers.conflicts import (
    CLIPPING,
    FOREIGN_OPTIMIZER,
    GRADIENT_HOOKS,
    JITTOR,
    NO_LINK,
    OPTIMIZER_HOOKS,
    SEVERAL_OPTIMIZERS,
    Conflict,
)
from memfit.levers.lever import Fallback, LeversOn, Rung, Running, Setting
from memfit.levers.microbatches import MICROBATCHES
from memfit.workload import Workload

_UPDATING: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerLever] = weakref.WeakKeyDictionary()
"""The lever that is applied to an optimizer at present."""
_INSTEAD = {
    "bf16-true": "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    "16-mixed": "use 'bf16-mixed', or set levers.optimizer to 'as-is'",
    CLIPPING: "set Workload.max_grad_norm=None, or levers.optimizer to 'as-is'",
    FOREIGN_OPTIMIZER: "use an optimizer of torch.optim, or set levers.optimizer to 'as-is'",
    GRADIENT_HOOKS: "set levers.optimizer to 'as-is'",
    OPTIMIZER_HOOKS: "set levers.optimizer to 'as-is', or call the hooks' code after the step",
    JITTOR: "set levers.optimizer to 'as-is'",
    MICROBATCHES: "set levers.microbatch_size to the whole batch, or levers.optimizer to 'as-is'",
    NO_LINK: "name a GPU with a known link_bytes_per_second, or set levers.optimizer to 'as-is'",
    SEVERAL_OPTIMIZERS: "use one optimizer with several groups, or set levers.optimizer to 'as-is'",
}
"""What to do about a conflict with a way of updating parameters."""


class UpdateLever(Fallback):
    """A way of updating the parameters, tried where no plan with the user's own optimizer as it is is cheap.

    Attributes:
        value: Of `Levers.optimizer`.
    """

    field = "optimizer"
    value: ClassVar[OptimizerLever]

    def is_used(self, on: LeversOn) -> bool:
        return on.levers.optimizer == self.value

    def setting(self, on: LeversOn) -> str:
        return self.value

    def brief(self, on: LeversOn) -> str:
        return f"optimizer {self.value}"

    def is_applied(self, workload: Workload) -> bool:
        return _UPDATING.get(workload.optimizer) == self.value

    @contextlib.contextmanager
    def apply(self, levers: Levers, running: Running) -> Iterator[Running]:
        optimizer = running.workload.optimizer
        if optimizer in _UPDATING:
            raise PlanError(
                f"levers.optimizer={_UPDATING[optimizer]!r} is applied to Workload.optimizer already: call close() on"
                " the earlier step first"
            )
        _UPDATING[optimizer] = self.value
        try:
            with self.updating(running) as changed:
                yield changed
        finally:
            del _UPDATING[optimizer]

    @abc.abstractmethod
    def updating(self, running: Running) -> AbstractContextManager[Running]:
        """Have a step update its parameters so, until the context is left."""

    def changes_state(self, levers: Levers) -> bool:
        return True

    def fallback(self, base: Levers) -> Levers:
        return msgspec.structs.replace(base, optimizer=self.value)

    def most_saved_bytes(self, trace: Trace) -> int:
        return state_bytes(trace) + temporary_bytes(trace)

    def rungs(self) -> Mapping[str, Rung]:
        return {self.name: self._rung}

    def _rung(self, step: Setting, levers: Levers) -> tuple[Levers, str]:
        return self.fallback(levers), self.value


def update_conflicts(name: str, reasons: Mapping[str, str], *own: Conflict) -> tuple[Conflict, ...]:
    """Return the conflicts of a way of updating parameters: its own, those of some reasons, and Jittor's."""
    reasons = {**reasons, JITTOR: "this lever needs PyTorch"}
    return *own, *(Conflict(name, other, why, _INSTEAD[other]) for other, why in reasons.items())


def state_bytes(trace: Trace) -> int:
    """Return the bytes of the optimizer's state in a step."""
    return sum(storage.nbytes for storage in trace.storages if storage.category == "optimizer state")


def temporary_bytes(trace: Trace) -> int:
    """Return the most that tensors which only the optimizer's step has take at a time."""
    changes = Counter[int]()
    for storage in trace.storages:
        if trace.ops[storage.birth].phase == "optimizer" and storage.death < len(trace.ops):
            changes[storage.birth] += storage.nbytes
            changes[storage.death + 1] -= storage.nbytes
    return max(itertools.accumulate(changes[at] for at in sorted(changes)), default=0)


@contextlib.contextmanager
def restricted(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Have an optimizer see only some parameters of one of its groups, until the context is left."""
    groups, before = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], list(parameters)
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, before

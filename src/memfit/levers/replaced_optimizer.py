"""Optimizers of less state, as levers: another one in place of the user's, over the same parameters and groups.

Here are their base, and Adafactor, which keeps a row and a column of the second moment (N. Shazeer, M. Stern 2018,
*Adafactor: Adaptive Learning Rates with Sublinear Memory Cost*), from PyTorch. Its steps are relative to each
parameter's size: its learning rate is that of its paper, scheduled as the user's is, and weights decay per step as
before.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from memfit._torch import mark_as_stepped
from memfit.levers.lever import Circumstance, Conflict, Running
from memfit.levers.parameter_updates import UpdateLever, update_conflicts

ADAFACTOR = "Adafactor"
BF16_UPDATES = "bf16 weights are updated through your own optimizer"
HOOKS = "they belong to your own optimizer, and its step does not run"
_ADAFACTOR_RATE = 1e-2
_FOLLOWS = "memfit_follows"  # in a group: the number of the user's group whose settings it has

Optimizer = torch.optim.Optimizer


class ReplacedOptimizer(UpdateLever):
    """Another optimizer in the place of the user's, whose learning rates and weight decays follow those of its groups.

    Schedulers set these.
    """

    @contextlib.contextmanager
    def updating(self, running: Running) -> Iterator[Running]:
        optimizer = running.workload.optimizer
        made: Any = self.kind()(
            [
                {"params": list(group["params"]), _FOLLOWS: index, **self.converted(group)}
                for index, group in enumerate(optimizer.param_groups)
            ]
        )
        made.memfit_stands_for = type(optimizer).__qualname__

        def follow(*_: Any) -> None:
            for group in made.param_groups:  # of which a step may see some only
                group.update(self.converted(optimizer.param_groups[group[_FOLLOWS]]))
            mark_as_stepped(optimizer)

        made.register_step_pre_hook(follow)
        try:
            self.take_over(made, optimizer)
            yield dataclasses.replace(running, workload=dataclasses.replace(running.workload, optimizer=made))
        finally:
            self.give_back(made, optimizer)

    @abc.abstractmethod
    def kind(self) -> Any:
        """Return the class of the optimizer."""

    @abc.abstractmethod
    def converted(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of one of the user's groups as this optimizer has them."""

    def take_over(self, made: Any, optimizer: Optimizer) -> None:
        """Have it go on from the user's optimizer's state, which keeps none of what it can use."""

    def give_back(self, made: Any, optimizer: Optimizer) -> None:
        """Put its state into the user's optimizer, as far as that can use it."""


class Adafactor(ReplacedOptimizer):
    """Adafactor, which keeps a row and a column of the second moment."""

    name = ADAFACTOR
    rungs = (ADAFACTOR,)
    value = "adafactor"
    numerics_class = "changed"
    conflicts = (
        Conflict(ADAFACTOR, "bf16-true", BF16_UPDATES, "use 'bf16-mixed', or set levers.optimizer to 'as-is'"),
        Conflict(
            ADAFACTOR,
            Circumstance.SEVERAL_OPTIMIZERS,
            "one optimizer can't keep the different update rules of several",
            "use one optimizer, or set levers.optimizer to 'as-is'",
        ),
        *update_conflicts(ADAFACTOR, {Circumstance.OPTIMIZER_HOOKS: HOOKS}),
    )

    def kind(self) -> Any:
        return torch.optim.Adafactor

    def converted(self, group: dict[str, Any]) -> dict[str, Any]:
        rate, first = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
        scale = rate / first if first else 0.0
        decay = float(group.get("weight_decay", 0.0)) * first / _ADAFACTOR_RATE
        return {"lr": _ADAFACTOR_RATE * scale, "weight_decay": decay}

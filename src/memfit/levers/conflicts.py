"""Conflicts: what a lever does not go with, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from memfit.ir import Numerics

COUPLING_LOSS = "a loss that couples the samples of a batch"
BATCH_NORM = "BatchNorm in training mode"
CLIPPING = "Workload.max_grad_norm"
SEVERAL_OPTIMIZERS = "several optimizers"
FOREIGN_OPTIMIZER = "an optimizer from outside torch.optim"
OPTIMIZER_HOOKS = "hooks around the optimizer's step, or a replaced step method"
GRADIENT_HOOKS = "gradient hooks"
COMPILED = "torch.compile"
NO_LINK = "a device without a link to the host"
JITTOR = "memfit.jittor"
ADAPTING = "a plan for each batch's shapes (`adaptive=True`)"


class Conflict(NamedTuple):
    """Two things that don't go together.

    Attributes:
        one: A lever, or its setting.
        other: A lever or its setting, or something about the workload, the device or the call.
        why: What would go wrong.
        instead: What to do.
        unless: The numerics class under which they are allowed all the same; None for none.
    """

    one: str
    other: str
    why: str
    instead: str
    unless: Numerics | None = None

    def row(self) -> str:
        """Return the row of the table."""
        exception = f" (allowed under `numerics='{self.unless}'`)" if self.unless else ""
        return f"| {self.one} | {self.other} | {self.why}{exception} | {self.instead} |"


def met(conflicts: Iterable[Conflict], used: Collection[str], allowed: Numerics = "exact") -> list[Conflict]:
    """Return the conflicts of levers, settings and circumstances that are used, under the numerics class allowed."""
    return [c for c in conflicts if c.one in used and c.other in used and c.unless != allowed]

"""Several optimizers as one, for models whose parameters are updated by different rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.errors import WorkloadError


class Optimizers(torch.optim.Optimizer):
    """Several optimizers that take their steps together: for `Workload.optimizer`, and for a scheduler of all.

    Its parameter groups are theirs, the same dicts, one optimizer's after the other's; so is its state. What a step
    skips, it skips for all of them.

    Args:
        optimizers: Each over parameters of its own.

    Raises:
        WorkloadError: There are none, or two have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [id(p) for group in groups for p in group["params"]]
        if not groups or len(set(parameters)) < len(parameters):
            raise WorkloadError(
                f"Optimizers was given {len(optimizers)} optimizers over {len(parameters)} parameters, of which"
                f" {len(set(parameters))} are different: give one or more, each over parameters of its own"
            )
        self._counts = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.optimizers = list(optimizers)
        self.param_groups = groups
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step with each; closures are not supported."""
        if closure is not None:
            raise WorkloadError("Optimizers.step(closure=...): several optimizers can't share a closure; give none")
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while this is made; later add it to the optimizer that is to have it, before."""
        if hasattr(self, "optimizers"):
            raise WorkloadError("Optimizers.add_param_group: add it to one of its optimizers, and make this anew")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, into each."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Have each optimizer use the groups and the state of this one."""
        start = 0
        for optimizer, count in zip(self.optimizers, self._counts, strict=True):
            optimizer.param_groups = self.param_groups[start : start + count]
            optimizer.state = self.state
            start += count

"""An optimizer's tensors; and several optimizers as one, for models whose parameters have different update rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.errors import WorkloadError
from memfit.workload import tensors_of


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    return [tensor for values in optimizer.state.values() for tensor in tensors_of(values)]


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one, for `Workload.optimizer` and for a common scheduler.

    Its parameter groups and its state are those of the optimizers, the same dicts, in their order. A skipped update is
    skipped for all of them.

    Args:
        optimizers: The optimizers, each over parameters of its own.

    Raises:
        WorkloadError: None is given, or two share a parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [id(p) for group in groups for p in group["params"]]
        if not groups or len(set(parameters)) < len(parameters):
            raise WorkloadError(
                f"Optimizers(optimizers=...) has {len(optimizers)} optimizers over {len(parameters)} parameters,"
                f" {len(set(parameters))} of them different: give one or more, without a parameter in common"
            )
        self._counts = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.optimizers = list(optimizers)
        self.param_groups = groups
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer; closures are not supported."""
        if closure is not None:
            raise WorkloadError(
                "Optimizers.step(closure=...): several optimizers can't share a closure; call step() without one"
            )
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group during construction; add later ones to one of the optimizers."""
        if hasattr(self, "optimizers"):
            raise WorkloadError(
                "Optimizers.add_param_group: add the group to one of the optimizers, and create Optimizers anew"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states from `state_dict` into the optimizers."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        start = 0
        for optimizer, count in zip(self.optimizers, self._counts, strict=True):
            optimizer.param_groups = self.param_groups[start : start + count]
            optimizer.state = self.state
            start += count


class CombinedOptimizers:
    """The optimizers of a loop, left unchanged, as one with all their parameters; the tape steps each by itself."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all optimizers."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

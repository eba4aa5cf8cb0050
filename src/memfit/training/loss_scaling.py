"""Loss scaling for fp16, whose gradients would otherwise flush to zero."""

from __future__ import annotations

from typing import Any

import torch

from memfit._torch.foreach import foreach_mul_
from memfit.workload import LossScaling


class LossScaler:
    """A loss scale, its rule of growth and backoff, and the number of skipped updates.

    The rule is that of dynamic loss scaling (Micikevicius et al. 2018, *Mixed Precision Training*, section 3.2) as
    `torch.amp.GradScaler` has it. The scale stays between a floor and a ceiling; it is a Python number, so that reading
    it does not wait for the device; and an update is skipped for all optimizers or none.

    Attributes:
        skips: Number of updates skipped so far.
        skips_in_a_row: Number of updates skipped since the last one that was made.
    """

    def __init__(self, settings: LossScaling | None = None) -> None:
        self.settings = settings or LossScaling()
        self.scale = self.settings.initial
        self.skips = self.skips_in_a_row = 0
        self._steps_since_change = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, to run backward on."""
        return (loss if loss.itemsize >= 4 else loss.float()) * self.scale

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if gradients:
            foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, *, overflowed: bool) -> None:
        """Update the scale after a step, and count a skipped update."""
        self.skips += overflowed
        self.skips_in_a_row = self.skips_in_a_row + 1 if overflowed else 0
        if self.settings.growth_interval is None:
            return
        self._steps_since_change = 0 if overflowed else self._steps_since_change + 1
        if overflowed:
            self.scale = max(self.scale * self.settings.backoff_factor, self.settings.floor)
        elif self._steps_since_change == self.settings.growth_interval:
            self.scale = min(self.scale * self.settings.growth_factor, self.settings.ceiling)
            self._steps_since_change = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "steps_since_change": self._steps_since_change,
            "skips": self.skips,
            "skips_in_a_row": self.skips_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.scale = float(state["scale"])
        self._steps_since_change = int(state["steps_since_change"])
        self.skips, self.skips_in_a_row = int(state["skips"]), int(state["skips_in_a_row"])

"""Combinations of levers that are captured only where they may be faster than the best plan found without them.

A compiled step is lowered by its compiler each time it is captured, which takes as long as ten captures of the step as
it is; so compiled microbatches wait until one is expected to be the fastest. So do microbatches of a precision whose
step of the whole batch is slow, since smaller ones are hardly faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from memfit.ir.plan import Levers, Prediction
from memfit.levers import registry
from memfit.solver.frontier import Combination

_HALVING = 0.96
"""The least time of a compiled step, as a multiple of the one expected by the next larger step: from one size to the
next it was 0.961 to 1.0 on ViT, BERT and a mixture of experts (predicted, one thread of an AMD EPYC)."""
_DOUBT = 0.95
"""The error of predicted times of compiled steps beside those of steps as they are: ×0.95 on the same mixture of
experts. Where both are near, plans are measured, and a compiled one is to be among them."""


class Steps(Protocol):
    """Captured steps, and their predictions."""

    def captured(self, wanted: Sequence[Levers]) -> list[Levers]:
        """Capture the step with combinations of levers; return the ones that work."""

    def predicted(self, levers: Levers) -> Prediction:
        """Return the prediction for the step with some levers."""

    def combination(self, levers: Levers) -> Combination:
        """Return the problem of choosing regions under some levers."""


class Postponed:
    """Combinations that wait, and what their steps are expected to take.

    Args:
        steps: The captured steps.
        waiting: The combinations, each with the one of the whole batch that it waits for.
        captured: The combinations that are captured.
    """

    def __init__(self, steps: Steps, waiting: Mapping[Levers, Levers], captured: Sequence[Levers]) -> None:
        self._steps, self._wholes = steps, waiting
        self.waiting = list(waiting)
        self._compiled = [levers for levers in captured if registry.compiles(levers)]

    @property
    def compiled_sizes(self) -> list[int]:
        """The sizes of compiled microbatches that compiled steps told not to capture, the largest first."""
        if not self._compiled:
            return []
        return sorted({levers.microbatch_size for levers in self.waiting if registry.compiles(levers)}, reverse=True)

    def next(self, best_seconds: float, peak_bytes: int) -> list[Levers]:
        """Capture those that need not wait, and return the ones that work; none where the others can wait.

        Args:
            best_seconds: The step of the best plan that fits; infinite where none does, and nothing can wait.
            peak_bytes: What a step may hold.
        """
        while chosen := self._chosen(best_seconds, peak_bytes):
            self.waiting = [levers for levers in self.waiting if levers not in chosen]
            if found := self._steps.captured(chosen):
                self._compiled += filter(registry.compiles, found)
                return found
        return []

    def _chosen(self, best_seconds: float, peak_bytes: int) -> list[Levers]:
        """Return what may be enough faster; of compiled steps the largest, which tells of smaller ones."""
        if math.isinf(best_seconds):
            return self.waiting
        compiled = [levers for levers in self.waiting if registry.compiles(levers)]
        for levers in sorted(compiled, key=lambda levers: -levers.microbatch_size):
            if self._expected_seconds(levers, peak_bytes) < best_seconds:
                return [levers]
        others = [levers for levers in self.waiting if levers not in compiled]
        return others if any(self._seconds(self._whole(levers)) < best_seconds for levers in others) else []

    def _expected_seconds(self, levers: Levers, peak_bytes: int) -> float:
        """Return what a compiled step takes at least.

        It is expected to be to the step as it is, in time and in peak, as the next larger one was. Infinite where none
        was captured, where another compiler's was faster, or where the step as it is does not fit.
        """
        whole, size = self._whole(levers), levers.microbatch_size
        family = registry.uncompiled(whole)
        larger = [
            x for x in self._compiled if x.microbatch_size > size and registry.uncompiled(self._whole(x)) == family
        ]
        if not larger:
            return math.inf
        fastest = min(larger, key=lambda x: (x.microbatch_size, self._seconds(x)))
        own, other = registry.uncompiled(levers), registry.uncompiled(fastest)
        if self._whole(fastest) != whole or len(self._steps.captured([own, other])) < 2:
            return math.inf
        compiled, plain = self._steps.predicted(fastest), self._steps.predicted(other)
        bound = self._steps.combination(own).solver.bound(int(peak_bytes * plain.peak_bytes / compiled.peak_bytes))
        least = _DOUBT * _HALVING ** math.log2(fastest.microbatch_size / size)
        return math.inf if bound is None else least * bound * compiled.step_seconds / plain.step_seconds

    def _whole(self, levers: Levers) -> Levers:
        return self._wholes.get(levers, levers)

    def _seconds(self, levers: Levers) -> float:
        return self._steps.predicted(levers).step_seconds

"""Which of several plans to run a batch with: an online choice that learns from what steps take.

A bandit whose arms are plans. Predictions are its prior: what matters is not how far they are off for a batch, which
all plans share, but how far one plan's is off compared with the others'. The plan with the lowest lower
confidence bound on its time is run (Lai and Robbins, 1985, *Asymptotically Efficient Adaptive Allocation Rules*; Auer
et al., 2002, *Finite-time Analysis of the Multiarmed Bandit Problem*; ours is Bayesian, with a normal prior on the
logarithm of measured over predicted time). Only plans that are predicted to fit are ever run, explored ones too, and
measured peaks correct the predictions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_SPREAD = 0.08
"""How far plans' times are off from one another by, in logarithms: about 8 %."""
NOISE = 0.08
"""How far one step's time is from the next one's."""
MEMORY = 64
"""Steps that are remembered for each plan and bucket, about: machines change."""
_RISE = 1.01
OPTIMISM = 1.0
"""Standard deviations that a plan's time is taken to be below its mean."""


@dataclass
class Belief:
    """What was measured of a plan in a bucket: the logarithm of measured over predicted seconds."""

    count: float = 0.0
    mean: float = 0.0

    def learn(self, value: float) -> None:
        """Take a measurement into account; old ones fade."""
        self.count = min(self.count, MEMORY - 1) + 1
        self.mean += (value - self.mean) / self.count


@dataclass(frozen=True)
class Expected:
    """What a plan is predicted to take for a batch."""

    peak_bytes: float
    seconds: float


class Controller:
    """Chooses among plans.

    Args:
        budget_bytes: What a step may take.
        peak_error: Share of a predicted peak by which a measured one may be above it.

    Attributes:
        correction: The largest measured peak over its prediction so far, at least 1: applied to all predictions.
    """

    def __init__(self, budget_bytes: int, peak_error: float) -> None:
        self.budget_bytes = budget_bytes
        self.correction = 1.0
        self._peak_error = peak_error
        self._beliefs: dict[tuple[int, int], Belief] = defaultdict(Belief)
        self._common: dict[int, Belief] = defaultdict(Belief)
        self._ceiling_bytes = float(budget_bytes)

    def fits(self, expected: Expected) -> bool:
        """Tell whether a plan is predicted to fit the budget, its error bar and the correction included."""
        return expected.peak_bytes * self.correction * (1 + self._peak_error) <= self._ceiling_bytes

    def choose(self, bucket: int, expected: Sequence[Expected]) -> int | None:
        """Return the plan to run, by its position; None where none fits.

        Args:
            bucket: Batches that are alike.
            expected: For each plan.
        """
        fitting = [arm for arm, one in enumerate(expected) if self.fits(one)]
        return min(fitting, key=lambda arm: self._bound(bucket, arm, expected[arm].seconds), default=None)

    def learn(self, bucket: int, arm: int, expected: Expected, seconds: float | None, peak_bytes: int | None) -> None:
        """Take a step into account.

        Args:
            bucket: Of its batch.
            arm: Its plan.
            expected: What was predicted.
            seconds: What it took (> 0); None where that says nothing.
            peak_bytes: Its measured peak; None where it was not measured.
        """
        if seconds is not None:
            value = math.log(seconds / expected.seconds)
            self._beliefs[bucket, arm].learn(value)
            self._common[bucket].learn(value)
        self._ceiling_bytes = min(self.budget_bytes, self._ceiling_bytes * _RISE)
        if peak_bytes is not None:
            self.correction = max(self.correction, peak_bytes / expected.peak_bytes)

    def ran_out(self, expected: Expected) -> None:
        """Take into account that a plan ran out of memory: there was less than it is predicted to take.

        That may pass, so the budget is lowered to that, and rises again with every step that is done.
        """
        took = expected.peak_bytes * self.correction * (1 + self._peak_error)
        self._ceiling_bytes = min(self._ceiling_bytes, took * (1 - 1e-6))

    def _bound(self, bucket: int, arm: int, seconds: float) -> float:
        """Return a lower confidence bound on the logarithm of a plan's time."""
        belief = self._beliefs.get((bucket, arm), Belief())
        precision = PRIOR_SPREAD**-2 + belief.count * NOISE**-2
        mean = (PRIOR_SPREAD**-2 * self._common[bucket].mean + belief.count * NOISE**-2 * belief.mean) / precision
        return math.log(seconds) + mean - OPTIMISM / math.sqrt(precision)

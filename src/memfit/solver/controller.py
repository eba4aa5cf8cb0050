"""The online choice of a plan for each batch, which learns from measured steps.

It is a bandit whose arms are plans, with predictions as the prior. A prediction error that all plans share for a batch
does not matter, only the difference between plans. The plan with the lowest lower confidence bound on its time is run
(Lai and Robbins, 1985, *Asymptotically Efficient Adaptive Allocation Rules*; Auer et al., 2002, *Finite-time Analysis
of the Multiarmed Bandit Problem*; ours is Bayesian, with a normal prior on the logarithm of measured over predicted
time). Only plans that are predicted to fit are run, even for exploration, and measured peaks correct the predictions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_SPREAD = 0.08
"""Standard deviation of the plans' prediction errors from one another, in logarithms: about 8 %."""
NOISE = 0.08
"""Standard deviation of one step's time, in logarithms."""
MEMORY = 64
"""Approximate number of steps remembered for each plan and bucket, since machines change."""
_RISE = 1.01
OPTIMISM = 1.0
"""Distance of the confidence bound below the mean, in standard deviations."""


@dataclass
class Belief:
    """Measurements of a plan in a bucket: the mean logarithm of measured over predicted seconds."""

    count: float = 0.0
    mean: float = 0.0

    def learn(self, value: float) -> None:
        """Take a measurement into account; old ones fade."""
        self.count = min(self.count, MEMORY - 1) + 1
        self.mean += (value - self.mean) / self.count


@dataclass(frozen=True)
class ExpectedStep:
    """The prediction for a plan on a batch."""

    peak_bytes: float
    seconds: float


class Controller:
    """The chooser among plans.

    Args:
        peak_error: Relative distance by which a measured peak may exceed the predicted one.

    Attributes:
        correction: Largest ratio of a measured peak to its prediction so far, at least 1; applied to all predictions.
    """

    def __init__(self, budget_bytes: int, peak_error: float) -> None:
        self.budget_bytes = budget_bytes
        self.correction = 1.0
        self._peak_error = peak_error
        self._beliefs: dict[tuple[int, int], Belief] = defaultdict(Belief)
        self._common: dict[int, Belief] = defaultdict(Belief)
        self._ceiling_bytes = float(budget_bytes)

    def fits(self, expected: ExpectedStep) -> bool:
        """Tell whether a plan is predicted to fit the budget, with its error bar and the correction."""
        return expected.peak_bytes * self.correction * (1 + self._peak_error) <= self._ceiling_bytes

    def choose(self, bucket: int, expected: Sequence[ExpectedStep]) -> int | None:
        """Return the plan to run in a bucket of batches, by its position in the predictions; None where none fits."""
        fitting = [arm for arm, prediction in enumerate(expected) if self.fits(prediction)]
        return min(fitting, key=lambda arm: self._bound(bucket, arm, expected[arm].seconds), default=None)

    def learn(
        self, bucket: int, arm: int, expected: ExpectedStep, seconds: float | None, peak_bytes: int | None
    ) -> None:
        """Take a step into account.

        Args:
            seconds: Its measured time (> 0); None where that is not representative.
            peak_bytes: Its measured peak; None where it was not measured.
        """
        if seconds is not None:
            value = math.log(seconds / expected.seconds)
            self._beliefs[bucket, arm].learn(value)
            self._common[bucket].learn(value)
        self._ceiling_bytes = min(self.budget_bytes, self._ceiling_bytes * _RISE)
        if peak_bytes is not None:
            self.correction = max(self.correction, peak_bytes / expected.peak_bytes)

    def ran_out(self, expected: ExpectedStep) -> None:
        """Take into account that a plan ran out of memory: less was free than its predicted peak.

        The budget is lowered to that peak, and rises again with every completed step, since the cause may pass.
        """
        took = expected.peak_bytes * self.correction * (1 + self._peak_error)
        self._ceiling_bytes = min(self._ceiling_bytes, took * (1 - 1e-6))

    def _bound(self, bucket: int, arm: int, seconds: float) -> float:
        belief = self._beliefs.get((bucket, arm), Belief())
        precision = PRIOR_SPREAD**-2 + belief.count * NOISE**-2
        mean = (PRIOR_SPREAD**-2 * self._common[bucket].mean + belief.count * NOISE**-2 * belief.mean) / precision
        return math.log(seconds) + mean - OPTIMISM / math.sqrt(precision)

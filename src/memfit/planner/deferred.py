"""Combinations of levers that are captured only where they may be faster than the best plan found without them.

A compiled step is lowered by its compiler each time it is captured, which takes as long as ten captures of the step as
it is; so compiled microbatches wait until one is expected to be the fastest. So do microbatches of a precision whose
step of the whole batch is slow, since smaller ones are hardly faster.

So do microbatch sizes between two captured ones, where the larger has no room and the smaller is slow. Captured sizes
about halve, since each takes a capture, and times of operators of its own shapes. The one between that is tried has the
fewest microbatches that are expected to fit, all as equal as can be. Its peak is expected on the line between those of
the two: a peak is the largest of many sums that grow with the samples, and no higher than on that line. Its time is
expected on the line through theirs by the number of microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from memfit.ir import Levers, Prediction
from memfit.levers import compiles, uncompiled
from memfit.solver import Combination

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


class DeferredCandidates:
    """Combinations that wait, and what their steps are expected to take.

    Args:
        steps: The captured steps.
        waiting: The combinations, each with the one of the whole batch that it waits for.
        captured: The combinations that are captured.
    """

    def __init__(self, steps: Steps, waiting: Mapping[Levers, Levers], captured: Sequence[Levers]) -> None:
        self._steps, self._wholes = steps, waiting
        self.waiting = list(waiting)
        self._compiled = [levers for levers in captured if compiles(levers)]

    @property
    def compiled_sizes(self) -> list[int]:
        """The sizes of compiled microbatches that compiled steps told not to capture, the largest first."""
        if not self._compiled:
            return []
        return sorted({levers.microbatch_size for levers in self.waiting if compiles(levers)}, reverse=True)

    def next(self, best_seconds: float, peak_bytes: int) -> list[Levers]:
        """Capture those that need not wait, and return the ones that work; none where the others can wait.

        Args:
            best_seconds: The step of the best plan that fits; infinite where none does, and nothing can wait.
            peak_bytes: What a step may hold.
        """
        while chosen := self._chosen(best_seconds, peak_bytes):
            self.waiting = [levers for levers in self.waiting if levers not in chosen]
            if found := self._steps.captured(chosen):
                self._compiled += filter(compiles, found)
                return found
        return []

    def _chosen(self, best_seconds: float, peak_bytes: int) -> list[Levers]:
        """Return what may be enough faster; of compiled steps the largest, which tells of smaller ones."""
        if math.isinf(best_seconds):
            return self.waiting
        compiled = [levers for levers in self.waiting if compiles(levers)]
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
        family = uncompiled(whole)
        larger = [x for x in self._compiled if x.microbatch_size > size and uncompiled(self._whole(x)) == family]
        if not larger:
            return math.inf
        fastest = min(larger, key=lambda x: (x.microbatch_size, self._seconds(x)))
        own, other = uncompiled(levers), uncompiled(fastest)
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


class _Between(NamedTuple):
    seconds: float
    levers: Levers


def size_between(
    searched: Sequence[Levers],
    predicted: Callable[[Levers], Prediction],
    *,
    batch_size: int,
    budget_bytes: int,
    below_seconds: float,
) -> Levers | None:
    """Return the levers of the size between that is expected to be fastest; None where none is fast enough.

    Args:
        searched: Combinations of levers that are captured.
        predicted: Returns the prediction for one of them.
        batch_size: Samples that the microbatches are parts of.
        budget_bytes: What a step may hold.
        below_seconds: What its step has to be expected to take less than.
    """
    families: dict[Levers, list[Levers]] = defaultdict(list)
    for levers in searched:
        families[replace(levers, microbatch_size=batch_size)].append(levers)
    found = [
        between
        for family in families.values()
        for high, low in itertools.pairwise(sorted(family, key=lambda levers: -levers.microbatch_size))
        if (between := _between(high, low, predicted, batch_size, budget_bytes)) is not None
    ]
    best = min(found, key=lambda between: between.seconds, default=None)
    return best.levers if best is not None and best.seconds < below_seconds else None


def _between(
    high: Levers, low: Levers, predicted: Callable[[Levers], Prediction], batch_size: int, budget_bytes: int
) -> _Between | None:
    large, small = predicted(high), predicted(low)
    if not small.peak_upper_bytes <= budget_bytes < large.peak_upper_bytes:
        return None
    share = (budget_bytes - small.peak_upper_bytes) / (large.peak_upper_bytes - small.peak_upper_bytes)
    most = low.microbatch_size + int(share * (high.microbatch_size - low.microbatch_size))
    fewest, count, many = (-(-batch_size // size) for size in (high.microbatch_size, most, low.microbatch_size))
    if count == many:
        return None
    seconds = large.step_seconds + (small.step_seconds - large.step_seconds) * (count - fewest) / (many - fewest)
    return _Between(seconds, replace(low, microbatch_size=-(-batch_size // count)))

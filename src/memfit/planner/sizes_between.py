"""Microbatch sizes between two captured ones: one is captured where the larger has no room, and a smaller is slow.

Captured sizes about halve, since each takes a capture, and times of operators of its own shapes. The one between that
is tried has the fewest microbatches that are expected to fit, all as equal as can be. Its peak is expected on the line
between those of the two: a peak is the largest of many sums that grow with the samples, and no higher than on that
line. Its time is expected on the line through theirs by the number of microbatches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from memfit.ir.plan import Levers, Prediction


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

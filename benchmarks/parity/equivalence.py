"""Equivalence, tested: two one-sided t-tests on differences that are paired by seed.

Source: Schuirmann 1987, *A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability*; the t-tests are SciPy's. "equivalent" is said where both tests reject, at
`LEVEL`, that the mean differs by the margin or more; "refuted" where one t-test says that it does differ by more.
Between the two nothing is said, but how many seeds would do, were mean and spread to stay.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

LEVEL = 0.05
_MOST_SEEDS = 1000

Verdict = Literal["equivalent", "refuted", "undecided"]


@dataclass(frozen=True)
class Equivalence:
    """What paired differences say.

    Attributes:
        mean: Of the differences.
        half_width: Of the interval around the mean, of confidence 1 - 2 * `LEVEL`.
        seeds_needed: Seeds that would decide, at this mean and spread; None where no number up to 1,000 does.
    """

    verdict: Verdict
    mean: float
    half_width: float
    p_equivalent: float
    seeds_needed: int | None


def compare(differences: Sequence[float], margin: float) -> Equivalence:
    """Return whether differences are smaller than a margin.

    Args:
        differences: One for each seed; two or more.
        margin: Above 0.
    """
    n, mean = len(differences), statistics.fmean(differences)
    if not all(map(math.isfinite, differences)):  # a training that did not survive is another one
        return Equivalence("refuted", mean, math.inf, 1.0, n)
    spread = statistics.stdev(differences)
    half_width = _half_width(spread, n)
    if spread <= 1e-12:  # a t-test divides by it
        verdict: Verdict = "equivalent" if abs(mean) < margin else "refuted"
        return Equivalence(verdict, mean, 0.0, float(verdict == "refuted"), n)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    p_equivalent = float(max(above, below))
    if p_equivalent <= LEVEL:
        return Equivalence("equivalent", mean, half_width, p_equivalent, n)
    if 1 - p_equivalent <= LEVEL:  # the opposite one-sided test
        return Equivalence("refuted", mean, half_width, p_equivalent, n)
    return Equivalence("undecided", mean, half_width, p_equivalent, _seeds_needed(mean, spread, margin))


def _half_width(spread: float, n: int) -> float:
    return float(stats.t.ppf(1 - LEVEL, n - 1)) * spread / math.sqrt(n)


def _seeds_needed(mean: float, spread: float, margin: float) -> int | None:
    gap = abs(margin - abs(mean))
    return next((n for n in range(3, _MOST_SEEDS + 1) if _half_width(spread, n) <= gap), None)

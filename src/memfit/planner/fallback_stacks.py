"""Fallbacks in stacks: settings of different fields of the update of parameters, tried together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from memfit.ir import Levers
from memfit.levers import UpdateLever


def expected_to_fit(
    base: Levers, fallbacks: Sequence[UpdateLever], lowest: Mapping[Levers, Callable[[], int]], peak_bytes: int
) -> Iterator[Levers]:
    """Yield a base with the stacks of fallbacks that fit if each saves what it saves alone, the cheapest first.

    Args:
        fallbacks: Those of the lowest price first.
        lowest: Returns the lowest peak of each combination captured.
        peak_bytes: The peak that fits.
    """
    if base not in lowest:
        return
    alone = [(lever, found) for lever in fallbacks if (found := lowest.get(lever.fallback(base))) is not None]
    held_bytes = lowest[base]()
    saved = [(lever, held_bytes - found()) for lever, found in alone]
    for count in range(2, len({lever.field for lever, _ in saved}) + 1):
        for stack in itertools.combinations(saved, count):
            if len({lever.field for lever, _ in stack}) < count:
                continue
            if held_bytes - sum(nbytes for _, nbytes in stack) <= peak_bytes:
                levers = base
                for lever, _ in stack:
                    levers = lever.fallback(levers)
                yield levers

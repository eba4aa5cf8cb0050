"""Activities of the reasons that keep a storage alive, tightened by sets of options that exclude each other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence

Activity = tuple[bool, frozenset[int]]
"""(lost, options): 1 minus the sum of their x where `lost`, else the sum."""

ALWAYS: Activity = (True, frozenset())


class Tightening:
    """A tightening of activities into fewer and stronger ones.

    A storage is alive if any of its activities is 1. At most one of the options that exclude each other is chosen, so
    that the activities within such a set join into a single one, which is 1 for the same choices and larger for
    fractions of them: the storage is alive unless an option is chosen by which all of them are lost.
    """

    def __init__(self, conflicts: Sequence[frozenset[int]]) -> None:
        self.cliques = [_mask(members) for members in conflicts]
        self.found: dict[frozenset[Activity], frozenset[Activity]] = {}

    def __call__(self, activities: Collection[Activity]) -> frozenset[Activity]:
        """Return activities with the same maximum for every choice, and at least that maximum for fractions."""
        key = frozenset(activities)
        if key not in self.found:
            self.found[key] = self._tightened(key)
        return self.found[key]

    def _tightened(self, activities: frozenset[Activity]) -> frozenset[Activity]:
        losing = {_mask(members) for lost, members in activities if lost}
        gaining = {_mask(members) for lost, members in activities if not lost and members}
        gained = functools.reduce(operator.or_, gaining, 0)
        lost, won = {m & ~gained for m in losing}, set(gaining)
        for clique in self.cliques:
            within = [m for m in losing if not m & ~clique]
            if within:
                lost.add(functools.reduce(operator.and_, within) & ~gained)
                won -= {m for m in gaining if not m & ~clique}  # no larger than the one just added
            elif gained & clique:
                won.add(gained & clique)
        least = [m for m in lost if not any(rival != m and not rival & ~m for rival in lost)]
        largest = [m for m in won if not any(rival != m and not m & ~rival for rival in won)]
        return frozenset({(True, _members(m)) for m in least} | {(False, _members(m)) for m in largest})


def _mask(members: Collection[int]) -> int:
    return sum(1 << j for j in members)


def _members(mask: int) -> frozenset[int]:
    return frozenset(j for j in range(mask.bit_length()) if mask >> j & 1)

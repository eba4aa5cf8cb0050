"""What keeps a storage alive, as the strongest linear inequalities that options which exclude each other allow."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence

Activity = tuple[bool, frozenset[int]]
"""(lost, options): 1 minus the sum of their x where `lost`, else the sum."""

ALWAYS: Activity = (True, frozenset())


class Tightening:
    """Joins activities into fewer and stronger ones.

    A storage is alive if any of its activities is 1. Of options that exclude each other at most one is
    chosen, so that within such a set the activities join into a single one, which is 1 for the same choices
    and larger for fractions of them: it is alive unless an option is chosen that all of them are lost with.

    Args:
        conflicts: Sets of options of which at most one can be chosen.
    """

    def __init__(self, conflicts: Sequence[frozenset[int]]) -> None:
        self.cliques = [_mask(members) for members in conflicts]
        self.found: dict[frozenset[Activity], frozenset[Activity]] = {}

    def __call__(self, activities: Collection[Activity]) -> frozenset[Activity]:
        """Return activities whose maximum is that of others for every choice, and at least theirs for fractions."""
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
        least = [m for m in lost if not any(other != m and not other & ~m for other in lost)]
        most = [m for m in won if not any(other != m and not m & ~other for other in won)]
        return frozenset({(True, _members(m)) for m in least} | {(False, _members(m)) for m in most})


def _mask(members: Collection[int]) -> int:
    return sum(1 << j for j in members)


def _members(mask: int) -> frozenset[int]:
    return frozenset(j for j in range(mask.bit_length()) if mask >> j & 1)

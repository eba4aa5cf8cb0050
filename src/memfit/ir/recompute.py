"""The effects of checkpointing a region: its recomputations, their allocations, and storages that die early.

The model follows non-reentrant `torch.utils.checkpoint`, with early stopping, selective contexts and
nesting. For each call of a region:

1. Of autograd's saves inside, only the outputs of the operators in `keep` are kept.
2. The tensor arguments are kept until the last of its saves dies.
3. When the backward pass first unpacks a save of the call, its operators run again up to the last save, without those
   in `keep`. Their storages live until the forward pass would have released them, or, where saved, until the backward
   pass releases that save.
4. The recomputation keeps only the arguments of regions inside it, not their saves; it ends with the last save outside
   of them, or where the last of them begins. Each of them is recomputed by itself later.
5. The state of the CPU's random generator is kept from each module call until the last of the region's saves dies, and
   another one while its operators run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.ir.remat import RegionCall, Regions


class RecomputedCopy(NamedTuple):
    """A storage that a recomputation allocates again.

    Attributes:
        storage: The storage that it is a copy of.
        born: The forward operator that allocates it again.
        released: The last forward operator of the recomputation at which it is alive.
        death: The backward operator after which it is released; -1 if none needs it.
        taken_by: The last inner region call to run again that takes it as an argument: it lives until then.
    """

    storage: int
    born: int
    released: int
    death: int
    taken_by: RegionCall | None = None

    @property
    def survives(self) -> bool:
        """Whether it outlives its recomputation."""
        return self.death >= 0 or self.taken_by is not None


@dataclass(frozen=True, eq=False)
class Recomputation:
    """One recomputation of a region call.

    Attributes:
        depth: Number of regions around it.
        cut: One past the last operator that runs again.
        kept: Operators before `cut` that do not run again.
        copies: The storages that it allocates again.
        states: Number of random generator states that it saves: one, and one for each call of the regions inside.
    """

    region: RegionCall
    depth: int
    cut: int
    kept: frozenset[int]
    copies: tuple[RecomputedCopy, ...]
    states: int

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key for the order in which recomputations run."""
        return (self.region.recompute_at, self.depth, -self.region.start)

    @property
    def rerun(self) -> list[int]:
        """The operators that run again."""
        return [op for op in range(self.region.start, self.cut) if op not in self.kept]


def recomputations(
    regions: Regions,
    region: RegionCall,
    kept: frozenset[int] = frozenset(),
    inside: Sequence[RegionCall] = (),
    depth: int = 0,
) -> Iterator[Recomputation]:
    """Yield the recomputations of a region call, which keeps operators, and of the calls inside it, which keep none."""
    children = [c for c in inside if not any(regions.contains(other, c) for other in inside)]
    yield _recomputation(regions, region, kept, children, depth)
    for child in children:
        within = [c for c in inside if regions.contains(child, c)]
        yield from recomputations(regions, child, frozenset(), within, depth + 1)


def _recomputation(
    regions: Regions, region: RegionCall, kept: frozenset[int], children: Sequence[RegionCall], depth: int
) -> Recomputation:
    trace = regions.trace
    deaths: dict[int, list[int]] = defaultdict(list)
    taken_by: dict[int, RegionCall] = {}
    elsewhere = {save for child in children for save in child.saves}
    cut = max((child.start for child in children), default=region.start)
    for index in region.saves:
        if index not in elsewhere:
            save = trace.saves[index]
            deaths[save.storage].append(save.death)
            cut = max(cut, save.at)
    for child in sorted(children, key=lambda child: child.recompute_at):
        taken_by |= dict.fromkeys(child.inputs, child)
        for save in (trace.saves[index] for index in child.saves):
            if save.storage in child.inputs:
                deaths[save.storage].append(save.death)
    cut = min(cut, region.stop)
    last = {storage: max(ends) for storage, ends in deaths.items()}
    copies = tuple(
        RecomputedCopy(storage, op, released(regions, storage, cut), last.get(storage, -1), taken_by.get(storage))
        for op in range(region.start, cut)
        if op not in kept
        for storage in trace.births[op]
    )
    states = 1 + sum(len(child.calls) for child in children)
    return Recomputation(region, depth, cut, kept, copies, states)


def released(regions: Regions, storage: int, cut: int) -> int:
    """Return the last forward operator of a recomputation that holds a storage allocated or kept in the region."""
    record = regions.trace.storages[storage]
    return min(max(record.release, record.birth), cut - 1)


def added_bytes(
    regions: Regions, again: Recomputation, workspace: Sequence[int], moved: frozenset[int] = frozenset()
) -> npt.NDArray[np.int64]:
    """Return the bytes that a recomputation adds, at each of its operators, to those alive when it starts."""
    region, storages = again.region, regions.trace.storages
    change = np.zeros(again.cut - region.start + 1, np.int64)
    for copy in again.copies:
        change[copy.born - region.start] += storages[copy.storage].nbytes
        if not copy.survives:
            change[copy.released - region.start + 1] -= storages[copy.storage].nbytes
    saved = {regions.trace.saves[s].storage for s in region.saves} | moved
    for storage in (s for op in again.kept for s in regions.trace.births[op] if s not in saved):
        change[0] += storages[storage].nbytes
        change[released(regions, storage, region.cut) - region.start + 1] -= storages[storage].nbytes
    runs = [0 if op in again.kept else workspace[op] for op in range(region.start, again.cut)]
    added: npt.NDArray[np.int64] = np.cumsum(change)[:-1] + np.array(runs, np.int64)
    return added


@dataclass(frozen=True)
class Keeper:
    """A reason why a storage outlives its release: until operator `end`.

    Attributes:
        end: The last operator at which this reason keeps it.
        lost_in: Region calls that remove the reason when checkpointed, unless they keep the operator that allocates
            the storage.
        needs: The region call that must be checkpointed for the reason to exist, if any.
    """

    end: int
    lost_in: frozenset[RegionCall]
    needs: RegionCall | None


class Keepers:
    """The reasons why storages outlive their release, when any of some outermost region calls may be checkpointed."""

    def __init__(self, regions: Regions, candidates: Collection[RegionCall]) -> None:
        self.regions = regions
        self._around: dict[int, list[RegionCall]] = defaultdict(list)
        self._takers: dict[int, list[RegionCall]] = defaultdict(list)
        for region in candidates:
            for call in region.calls:
                self._around[call].append(region)
            for storage in region.inputs:
                self._takers[storage].append(region)

    def of(self, storage: int) -> list[Keeper]:
        """Return the reasons why a storage outlives its release.

        Autograd's saves are lost in a region that allocates the storage again, or that holds it as an argument; any
        other storage from outside is held elsewhere anyway.
        """
        trace = self.regions.trace
        birth = trace.storages[storage].birth
        reasons = [Keeper(region.end, frozenset(), region) for region in self._takers[storage]]
        for index in self.regions.saves_of_storage[storage]:
            save = trace.saves[index]
            lost_in = frozenset(r for r in self.around(save.call) if birth >= r.start or storage in r.inputs)
            reasons.append(Keeper(save.death, lost_in, None))
        return reasons

    def around(self, call: int) -> list[RegionCall]:
        """Return the candidates that hold a module call."""
        return [region for one in self.regions.trace.call_chain(call) for region in self._around.get(one, ())]

"""The regions of a step that can be checkpointed, and what recomputing and offloading them does to its storages.

A region is a module, or a run of modules called one after the other. Recomputation follows non-reentrant
`torch.utils.checkpoint`, with early stopping, selective contexts and nesting. For each call of a region:

1. Of autograd's saves inside, only the outputs of the operators in `keep` are kept.
2. The tensor arguments are kept until the last of its saves dies.
3. When the backward pass first unpacks a save of the call, its operators run again up to the last save, without those
   in `keep`. Their storages live until the forward pass would have released them, or, where saved, until the backward
   pass releases that save.
4. The recomputation keeps only the arguments of regions inside it, not their saves; it ends with the last save outside
   of them, or where the last of them begins. Each of them is recomputed by itself later.
5. The state of the CPU's random generator is kept from each module call until the last of the region's saves dies, and
   another one while its operators run again.

With offload, what is kept waits in host memory:

1. An argument that has a gradient, and each output that the region keeps, is copied to the host once it is computed, in
   parallel to the computation; its storage is held until the end of the module's forward pass, which waits for the
   copy.
2. It is copied back before the recomputation: when the backward pass enters the module `Region.prefetch`, or when the
   recomputation starts. The recomputation waits for copies that are not complete.
3. The copy is held until the end of the recomputation, of autograd's save of it, or of the recomputation of the last
   region inside that takes it as an argument. Regions inside keep nothing in host memory themselves.

Copies run at the link's rate, one after the other in each direction, and both directions at the same time.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.ir.costs import CostTable
from memfit.ir.levers import Keep, Region
from memfit.ir.operators import COPY_IN, WAIT
from memfit.ir.trace import Call, Save, Trace

LEAST_BYTES = 2**16
"""Smaller storages stay on the device: the launch of a copy costs more than it saves."""
_GENERATOR_STATE_BYTES = 5056


@dataclass(frozen=True, eq=False)
class RegionCall:
    """One pass through a region: a forward call of its module, or of each of its modules one after the other.

    Attributes:
        calls: Indices into `Trace.calls`.
        start: The first operator that runs again.
        stop: One past its last operator.
        cut: One past the last operator that runs again.
        recompute_at: The backward operator just before which the recomputation runs.
        end: The operator after which the last save of the calls is released.
        saves: Indices into `Trace.saves`.
        inputs: Storages of the calls' tensor arguments that come from outside.
    """

    calls: tuple[int, ...]
    start: int
    stop: int
    cut: int
    recompute_at: int
    end: int
    saves: tuple[int, ...]
    inputs: tuple[int, ...]


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

    def overhead_seconds(self, costs: CostTable, trace: Trace) -> float:
        """Return its overhead beyond the operators that run again."""
        makers = {trace.ops[op].call for op in self.kept}
        beside = sum(op.call in makers for op in trace.ops[self.region.start : self.region.stop]) if makers else 0
        return costs.checkpoint_seconds + costs.selective_op_seconds * beside

    @property
    def rerun(self) -> list[int]:
        """The operators that run again."""
        return [op for op in range(self.region.start, self.cut) if op not in self.kept]


@dataclass(frozen=True)
class Transfer:
    """A storage that waits in host memory.

    Attributes:
        storage: Index into `Trace.storages`.
        call: The module call that sends it.
        landed: The last forward operator at which the copy to the host holds it.
        fetched: The backward operator just before which it is copied back; -1 when the recomputation starts.
        death: The last backward operator at which the recomputation's saves hold it; -1 if none does.
        taken_by: The last inner region call to run again that takes it as an argument: it lives until then.
    """

    storage: int
    call: int
    landed: int
    fetched: int
    death: int
    taken_by: RegionCall | None = None


def makers_of_kept(trace: Trace, regions: Iterable[Region]) -> list[str]:
    """Return the FQNs of the modules whose own operators make outputs that regions keep."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in trace.calls:
        if call.phase == "forward":
            calls[trace.modules[call.module].fqn].append(call)
    makers: set[str] = set()
    for region in regions:
        for first, last in zip(calls[region.modules[0]], calls[region.modules[-1]], strict=False):
            counts = Counter[str]()
            for op in trace.ops[first.start : last.end] if region.keep else ():
                if f"{op.name}#{counts[op.name]}" in region.keep:
                    makers.add(trace.fqn_of(op.call))
                counts[op.name] += op.phase == "forward"
    return sorted(makers)


class Regions:
    """The regions of a trace that can be checkpointed.

    Attributes:
        calls: For each module FQN that is called in the forward pass, its calls as regions.
        generator_state_bytes: Bytes of the CPU generator's state in the device's memory.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.generator_state_bytes = _GENERATOR_STATE_BYTES if trace.device == "cpu" else 0
        self.saves_of: dict[int, list[int]] = defaultdict(list)
        self.saves_of_storage: dict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(trace.saves):
            self.saves_of_storage[save.storage].append(index)
            for around in trace.call_chain(save.call):
                self.saves_of[around].append(index)
        self.calls: dict[str, list[RegionCall]] = defaultdict(list)
        self._forward: dict[str, list[int]] = defaultdict(list)
        for index, call in enumerate(trace.calls):
            if call.phase == "forward":
                self._forward[trace.modules[call.module].fqn].append(index)
                region = self._region_call((index,))
                if region is not None:
                    self.calls[trace.modules[call.module].fqn].append(region)
        self._runs: dict[tuple[str, ...], list[RegionCall]] = {}

    def calls_of(self, modules: tuple[str, ...]) -> list[RegionCall]:
        """Return the calls of a region.

        Raises:
            KeyError: It has no call that could be checkpointed, or its modules are not called one after the other.
        """
        if len(modules) == 1:
            if modules[0] not in self.calls:
                raise KeyError(modules[0])
            return self.calls[modules[0]]
        if modules not in self._runs:
            together = list(zip(*(self._forward[fqn] for fqn in modules), strict=False))
            are_as_many = all(len(self._forward[fqn]) == len(together) for fqn in modules)
            are_runs = all(self.follows(a, b) for calls in together for a, b in itertools.pairwise(calls))
            found = map(self._region_call, together if are_as_many and are_runs else [])
            self._runs[modules] = [region for region in found if region is not None]
        if not self._runs[modules]:
            raise KeyError(", ".join(modules))
        return self._runs[modules]

    def follows(self, call: int, later: int) -> bool:
        """Tell whether a module call comes just after another, with no operator in between."""
        first, second = self.trace.calls[call], self.trace.calls[later]
        return first.parent == second.parent and first.microbatch == second.microbatch and first.end == second.start

    def _region_call(self, calls: tuple[int, ...]) -> RegionCall | None:
        first, last = self.trace.calls[calls[0]], self.trace.calls[calls[-1]]
        saves = [s for call in calls for s in self.saves_of[call] if self.trace.saves[s].unpacked >= 0]
        start = first.start
        while start < last.end and self.trace.ops[start].name in (COPY_IN, WAIT):
            start += 1  # weights of the region's modules, which are there when it runs again
        if not saves or last.end <= start:
            return None
        records = [self.trace.saves[s] for s in saves]
        inputs = dict.fromkeys(s for call in calls for s in self.trace.calls[call].inputs)
        return RegionCall(
            calls=calls,
            start=start,
            stop=last.end,
            cut=min(max(r.at for r in records), last.end),
            recompute_at=min(r.unpacked for r in records),
            end=max(r.death for r in records),
            saves=tuple(saves),
            inputs=tuple(s for s in inputs if self.trace.storages[s].birth < start),
        )

    @functools.cached_property
    def _occurrence(self) -> dict[str, list[int]]:
        positions: dict[str, list[int]] = defaultdict(list)
        for index, op in enumerate(self.trace.ops):
            if op.phase == "forward":
                positions[op.name].append(index)
        return positions

    def op_key(self, region: RegionCall, op: int) -> str:
        """Return "overload#occurrence" of an operator within a region call."""
        name = self.trace.ops[op].name
        positions = self._occurrence[name]
        return f"{name}#{bisect.bisect_left(positions, op) - bisect.bisect_left(positions, region.start)}"

    def kept_ops(self, region: RegionCall, keep: Keep) -> frozenset[int]:
        """Return the operators of a region call that `keep` names."""
        if not keep:
            return frozenset()
        wanted = set(keep)
        return frozenset(op for op in range(region.start, region.stop) if self.op_key(region, op) in wanted)

    def later_siblings(self, region: RegionCall) -> Iterator[int]:
        """Return the forward calls that the parent of a region call makes after it, in their order."""
        last = self.trace.calls[region.calls[-1]]
        for index in self._children[last.parent, last.microbatch]:
            if self.trace.calls[index].start >= region.stop and index not in region.calls:
                yield index

    @functools.cached_property
    def _children(self) -> dict[tuple[int, int], list[int]]:
        children: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, call in enumerate(self.trace.calls):
            if call.phase == "forward":
                children[call.parent, call.microbatch].append(index)
        return children

    @functools.cached_property
    def backward_start(self) -> dict[int, int]:
        """For each forward call that has a backward pass, its first operator."""
        starts: dict[int, int] = {}
        for index, op in enumerate(self.trace.ops):
            if op.phase == "backward":
                for call in self.trace.call_chain(op.call):
                    starts.setdefault(call, index)
        return starts

    def contains(self, outer: RegionCall, inner: RegionCall) -> bool:
        """Tell whether a region call lies inside another."""
        if outer.calls == inner.calls or inner.stop - inner.start > outer.stop - outer.start:
            return False
        return not set(outer.calls).isdisjoint(self.trace.call_chain(inner.calls[0]))

    def recomputations(
        self,
        region: RegionCall,
        kept: frozenset[int] = frozenset(),
        inside: Sequence[RegionCall] = (),
        depth: int = 0,
    ) -> Iterator[Recomputation]:
        """Yield the recomputations of a region call, which keeps operators, and of those inside it, which keep none."""
        children = self._outermost(inside)
        saves = self.trace.saves
        own, deaths, taken_by = self._holders(region, children)
        ends = [region.start, *(child.start for child in children), *(saves[index].at for index in own)]
        cut = min(max(ends), region.stop)
        copies = tuple(
            RecomputedCopy(storage, op, self.released(storage, cut), deaths.get(storage, -1), taken_by.get(storage))
            for op in range(region.start, cut)
            if op not in kept
            for storage in self.trace.births[op]
        )
        yield Recomputation(region, depth, cut, kept, copies, states=1 + sum(len(child.calls) for child in children))
        for child in children:
            within = [c for c in inside if self.contains(child, c)]
            yield from self.recomputations(child, frozenset(), within, depth + 1)

    def _outermost(self, regions: Sequence[RegionCall]) -> list[RegionCall]:
        return [one for one in regions if not any(self.contains(other, one) for other in regions)]

    def _holders(
        self, region: RegionCall, children: Sequence[RegionCall]
    ) -> tuple[list[int], dict[int, int], dict[int, RegionCall]]:
        """Return what holds storages of a recomputation: its own saves, and by storage the last operator and region.

        The operator is that at which saves hold it; the region is the last one inside to run again with it.
        """
        elsewhere = {save for child in children for save in child.saves}
        own = [index for index in region.saves if index not in elsewhere]
        taken = [i for child in children for i in child.saves if self.trace.saves[i].storage in child.inputs]
        in_order = sorted(children, key=lambda child: child.recompute_at)
        return own, self._deaths([*own, *taken]), {s: child for child in in_order for s in child.inputs}

    def _deaths(self, saves: Iterable[int]) -> dict[int, int]:
        """Return the last operator at which saves hold a storage, by the storage."""
        deaths: dict[int, int] = {}
        for save in (self.trace.saves[index] for index in saves):
            deaths[save.storage] = max(save.death, deaths.get(save.storage, -1))
        return deaths

    def released(self, storage: int, cut: int) -> int:
        """Return the last forward operator of a recomputation that holds a storage allocated or kept in the region."""
        record = self.trace.storages[storage]
        return min(max(record.release, record.birth), cut - 1)

    def added_bytes(
        self, again: Recomputation, workspace: Sequence[int], moved: frozenset[int] = frozenset()
    ) -> npt.NDArray[np.int64]:
        """Return the bytes that a recomputation adds, at each of its operators, to those alive when it starts."""
        region, storages = again.region, self.trace.storages
        change = np.zeros(again.cut - region.start + 1, np.int64)
        for copy in again.copies:
            change[copy.born - region.start] += storages[copy.storage].nbytes
            if not copy.survives:
                change[copy.released - region.start + 1] -= storages[copy.storage].nbytes
        saved = {self.trace.saves[s].storage for s in region.saves} | moved
        for storage in (s for op in again.kept for s in self.trace.births[op] if s not in saved):
            change[0] += storages[storage].nbytes
            change[self.released(storage, region.cut) - region.start + 1] -= storages[storage].nbytes
        runs = [0 if op in again.kept else workspace[op] for op in range(region.start, again.cut)]
        added: npt.NDArray[np.int64] = np.cumsum(change)[:-1] + np.array(runs, np.int64)
        return added

    def transfers(
        self, region: RegionCall, kept: frozenset[int], prefetch: str, inside: Sequence[RegionCall] = ()
    ) -> tuple[Transfer, ...]:
        """Return the storages of a region call, with others inside, that wait in host memory."""
        trace = self.trace
        later = next((call for call in self.later_siblings(region) if trace.fqn_of(call) == prefetch), -1)
        start = self.backward_start.get(later, -1)
        fetched = start if start < region.recompute_at else -1
        _, deaths, taken_by = self._holders(region, self._outermost(inside))
        moved: dict[int, Transfer] = {}
        for call in region.calls:
            start, end = trace.calls[call].start, trace.calls[call].end
            arguments = [s for s in trace.calls[call].activations if s in region.inputs]
            outputs = [s for op in sorted(kept) if start <= op < end for s in trace.births[op]]
            for storage in (*arguments, *outputs):
                if trace.storages[storage].nbytes >= LEAST_BYTES and storage not in moved:
                    moved[storage] = Transfer(
                        storage, call, end - 1, fetched, deaths.get(storage, -1), taken_by.get(storage)
                    )
        return tuple(moved.values())

    def host_bytes(self, moved: Sequence[Transfer]) -> int:
        """Return the pinned memory of transfers, for the microbatch with the most.

        PyTorch's allocator of pinned memory rounds each tensor up to a power of two.
        """
        total: Counter[int] = Counter()
        for transfer in moved:
            nbytes = self.trace.storages[transfer.storage].nbytes
            total[self.trace.calls[transfer.call].microbatch] += 1 << (nbytes - 1).bit_length()
        return max(total.values(), default=0)

    def stall_seconds(
        self, costs: CostTable, seconds: npt.NDArray[np.float64], region: RegionCall, moved: Sequence[Transfer]
    ) -> float:
        """Return how long one run of a region call waits for transfers that the computation does not hide."""
        total = self.fetch_stall_seconds(costs, seconds, region, moved)
        for call in region.calls:
            hidden = seconds[self.trace.calls[call].start : self.trace.calls[call].end].sum()
            total += max(0.0, self._copy_seconds(costs, [t for t in moved if t.call == call]) - hidden)
        return float(total)

    def fetch_stall_seconds(
        self, costs: CostTable, seconds: npt.NDArray[np.float64], region: RegionCall, moved: Sequence[Transfer]
    ) -> float:
        """Return how long the recomputation of a region call waits for copies back; see `stall_seconds`."""
        hidden = seconds[moved[0].fetched : region.recompute_at].sum() if moved and moved[0].fetched >= 0 else 0.0
        return float(max(0.0, self._copy_seconds(costs, moved) - hidden))

    def _copy_seconds(self, costs: CostTable, moved: Sequence[Transfer]) -> float:
        """Return the time of copies in one direction; infinite where nothing is known of the link."""
        nbytes = sum(self.trace.storages[m.storage].nbytes for m in moved)
        if not nbytes:
            return 0.0
        return nbytes / costs.link_bytes_per_second if costs.link_bytes_per_second else math.inf

    def repeats_of(self, region: RegionCall) -> float:
        """Return how often a region call runs in the real step: the second microbatch stands for later ones."""
        return self.trace.later_microbatches if self.trace.calls[region.calls[0]].microbatch == 1 else 1.0


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
        self._holding: dict[int, list[RegionCall]] = {}
        for region in candidates:
            for call in region.calls:
                self._around[call].append(region)
            for storage in region.inputs:
                self._takers[storage].append(region)

    def of(self, storage: int) -> list[Keeper]:
        """Return the reasons why a storage outlives its release.

        Autograd's saves are lost in a region that allocates the storage again, or that holds it as an argument; any
        other storage from outside is held elsewhere anyway. So are those of a tensor that was unpacked before, as of
        a part of a saved input in whose backward pass a module runs again.
        """
        trace = self.regions.trace
        birth = trace.storages[storage].birth
        reasons = [Keeper(region.end, frozenset(), region) for region in self._takers[storage]]
        earlier: list[tuple[Save, frozenset[RegionCall]]] = []
        for index in self.regions.saves_of_storage[storage]:
            save = trace.saves[index]
            lost_in = frozenset(r for r in self.around(save.call) if birth >= r.start or storage in r.inputs)
            sources = [lost for other, lost in earlier if 0 <= other.unpacked <= save.at <= other.death]
            if sources:
                lost_in = lost_in.union(frozenset.intersection(*sources))
            else:
                earlier.append((save, lost_in))
            reasons.append(Keeper(save.death, lost_in, None))
        return reasons

    def around(self, call: int) -> list[RegionCall]:
        """Return the candidates that hold a module call."""
        if call not in self._holding:
            chain = self.regions.trace.call_chain(call)
            self._holding[call] = [region for one in chain for region in self._around.get(one, ())]
        return self._holding[call]

"""Which modules may be checkpointed, alone, in runs or nested, and what each region could keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from memfit.ir.cost import CostTable
from memfit.ir.offload import Transfer, fetch_stall_seconds, host_bytes, stall_seconds, transfers
from memfit.ir.recompute import Recomputation, added_bytes, recomputations
from memfit.ir.remat import Keep, Region, RegionCall, Regions
from memfit.ir.simulate import overhead_seconds, repeats, repeats_of
from memfit.ir.trace import Trace
from memfit.solve.keeps import FEW_OPERATORS, Ints, Worth, every_keep_set, keep_sets

_LEAST_SHARE = 0.002
_NESTED_LEAST_SHARE = 0.05
_KEEP_SETS = 768
_MOST_KEEP_SETS, _LEAST_KEEP_SETS = 128, 5
_LONGEST_CHAIN = 24
_OFFLOADED_KEEP_SETS = 6
_CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class Option:
    """One way to checkpoint a region.

    Attributes:
        regions: The region, and those inside it.
        kept: For each call of the region, the operators whose outputs it keeps.
        recomputations: What runs again for it.
        seconds: What it adds to the step.
        transfers: What waits in host memory meanwhile.
        host_bytes: What that takes there.
    """

    regions: tuple[Region, ...]
    kept: dict[RegionCall, frozenset[int]]
    recomputations: tuple[Recomputation, ...]
    seconds: float
    transfers: tuple[Transfer, ...] = ()
    host_bytes: int = 0

    def transfers_of(self, region: RegionCall) -> list[Transfer]:
        """Return what is sent from a region call."""
        return [one for one in self.transfers if one.call in region.calls]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the outermost region."""
        return self.regions[0].modules

    @property
    def is_whole(self) -> bool:
        """Whether all of one module is computed again, once."""
        return self.regions == (Region(self.modules[:1]),)


def refusals(regions: Regions) -> dict[str, str]:
    """Return why modules can't be checkpointed, by FQN: what they do would be done twice."""
    trace = regions.trace
    refused: dict[str, str] = {}
    checkpointed = {trace.modules[c.module].fqn for c in trace.calls if c.phase == "recompute"}
    for fqn, calls in regions.calls.items():
        if any(_related(fqn, other) for other in checkpointed):
            refused[fqn] = "is checkpointed by the model itself"
            continue
        for region in calls:
            if trace.modules[trace.calls[region.calls[0]].module].refuses_hooks:
                refused[fqn] = "runs a transform of torch.func, within which nothing can be recomputed"
                break
            if trace.ops[region.recompute_at].phase == "forward":
                refused[fqn] = "is differentiated within the loss, which would run it again there"
                continue
            changed = next((name for c in region.calls if (name := trace.calls[c].changed)), "")
            if changed:
                refused[fqn] = f"reads {changed}, which has changed by the time that it would run again"
                continue
            culprit = _writes_outside(trace, region)
            if culprit is not None:
                refused[fqn] = f"changes what was there before ({culprit}), which a recomputation would do again"
    return refused


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _writes_outside(trace: Trace, region: RegionCall) -> str | None:
    """Return the operator of a region call that writes to a storage from before it, running statistics aside."""
    for index in range(region.start, region.stop):
        for mutated in trace.ops[index].mutates:
            storage = trace.storages[mutated]
            statistics = storage.owner >= 0 and trace.modules[storage.owner].tracks_statistics
            if storage.birth < region.start and not (storage.category == "buffers" and statistics):
                return trace.ops[index].name
    return None


def options(
    regions: Regions, costs: CostTable, excluded: Collection[str] = (), *, offload: bool = False
) -> list[Option]:
    """Return every way to checkpoint each region that may be and that holds enough to matter.

    Modules alone, whole and with each set of operators kept that no other set of less bytes is as fast as
    (`solve.keeps`); runs of modules that are called one after the other; and both with the modules inside
    checkpointed again, or with what they keep waiting in host memory.

    Args:
        regions: The regions of a trace.
        costs: Seconds of the operators.
        excluded: FQNs to leave out.
        offload: Whether the host's memory may be used.
    """
    finder = _Finder(regions, costs, excluded)
    found = list(finder.options())
    return [*found, *finder.offloading(found)] if offload else found


class _Finder:
    def __init__(self, regions: Regions, costs: CostTable, excluded: Collection[str]) -> None:
        self.regions, self.trace, self.costs = regions, regions.trace, costs
        trace = regions.trace
        refused = refusals(regions)
        self.allowed = {fqn for fqn in regions.calls if fqn and fqn not in refused and fqn not in excluded}
        self.seconds = np.array([costs.seconds_of(trace.signatures[op.signature]) for op in trace.ops])
        self.workspace = [costs.of(trace.signatures[op.signature]).workspace_bytes for op in trace.ops]
        self.weighted = self.seconds * repeats(trace)
        self.forward_bytes = sum(s.nbytes for s in trace.storages if s.category == "activations")
        self.mutated = {m for op in trace.ops for m in op.mutates}
        self.keeps_like: dict[tuple[object, ...], list[Keep]] = {}

    def options(self) -> Iterator[Option]:
        singles = self._worthwhile((fqn,) for fqn in self.regions.calls if fqn in self.allowed)
        most = int(np.clip(_KEEP_SETS // max(1, len(singles)), _LEAST_KEEP_SETS, _MOST_KEEP_SETS))
        for modules in singles:
            for keep in ((), *self._keeps(self.regions.calls_of(modules)[0], most)):
                yield self._option((Region(modules, keep),))
        runs = self._worthwhile(self._runs(), {self._extent(modules) for modules in singles})
        for modules in runs:
            yield self._option((Region(modules),))
        for modules in (*singles, *runs):
            if self._droppable_bytes(modules) >= _NESTED_LEAST_SHARE * self.forward_bytes:
                inside = self._inside(modules, singles)
                if len(inside) > 1:
                    yield self._option((Region(modules), *(Region(each) for each in inside)))

    def offloading(self, found: Iterable[Option]) -> Iterator[Option]:
        """Return options with what they keep waiting in host memory; of those that keep operators, some.

        Arguments alone are also copied back late: as the region is recomputed, which then waits for them.
        """
        some: dict[tuple[str, ...], set[Keep]] = {}
        for region in (option.regions[0] for option in found if len(option.regions) == 1):
            first = self.regions.calls_of(region.modules)[0]
            if region.modules not in some:
                some[region.modules] = {(), *self._keeps(first, _OFFLOADED_KEEP_SETS)}
            if region.keep in some[region.modules]:
                for prefetch in dict.fromkeys((self._prefetch(region), *(() if region.keep else ("",)))):
                    option = self._option((replace(region, offload=True, prefetch=prefetch),))
                    if option.transfers:
                        yield option

    def _prefetch(self, region: Region) -> str:
        """Return the module whose backward pass hides copying back what a region sends: the first that is enough.

        It must be called after the region each time; of those that are, if none is enough, the last.
        """
        first, *others = self.regions.calls_of(region.modules)
        kept = self.regions.kept_ops(first, region.keep)
        found = ""
        for fqn in map(self.trace.fqn_of, self.regions.later_siblings(first)):
            moved = transfers(self.regions, first, kept, fqn)
            if moved and moved[0].fetched >= 0 and all(self._is_followed_by(call, fqn) for call in others):
                found = fqn
                if fetch_stall_seconds(self.regions, self.costs, self.seconds, first, moved) == 0:
                    break
        return found

    def _is_followed_by(self, call: RegionCall, fqn: str) -> bool:
        return any(self.trace.fqn_of(later) == fqn for later in self.regions.later_siblings(call))

    def _worthwhile(self, found: Iterator[tuple[str, ...]], seen: Collection[object] = ()) -> list[tuple[str, ...]]:
        """Return regions that hold enough to matter, the first of those that are the same operators."""
        kept: list[tuple[str, ...]] = []
        extents = set(seen)
        for modules in found:
            extent = self._extent(modules)
            if extent not in extents and self._droppable_bytes(modules) >= _LEAST_SHARE * self.forward_bytes:
                extents.add(extent)
                kept.append(modules)
        return kept

    def _extent(self, modules: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((r.start, r.stop) for r in self.regions.calls_of(modules))

    def _droppable_bytes(self, modules: tuple[str, ...]) -> int:
        storages, saves = self.trace.storages, self.trace.saves
        calls = self.regions.calls_of(modules)
        born = {saves[s].storage for r in calls for s in r.saves if storages[saves[s].storage].birth >= r.start}
        return sum(storages[s].nbytes for s in born)

    def _runs(self) -> Iterator[tuple[str, ...]]:
        """Return runs of modules that are called one after the other; of long chains, some of them."""
        for chain in self._chains():
            count = len(chain)
            stride = -(-count // _LONGEST_CHAIN)
            for length in range(2, count + 1):
                if length <= _LONGEST_CHAIN // 2 or length % stride == 0:
                    for start in range(0, count - length + 1, stride):
                        modules = tuple(chain[start : start + length])
                        if self._is_run(modules):
                            yield modules

    def _is_run(self, modules: tuple[str, ...]) -> bool:
        try:
            return bool(self.regions.calls_of(modules))
        except KeyError:
            return False

    def _chains(self) -> list[list[str]]:
        """Return the longest runs that may be checkpointed."""
        siblings: dict[int, list[int]] = defaultdict(list)
        for index, call in enumerate(self.trace.calls):
            if call.phase == "forward" and call.microbatch == 0 and call.parent >= 0:
                siblings[call.parent].append(index)
        chains: dict[tuple[str, ...], None] = {}
        for calls in siblings.values():
            chain: list[int] = []
            for index in [*calls, -1]:
                fits = index >= 0 and self.trace.fqn_of(index) in self.allowed
                if chain and not (fits and self.regions.follows(chain[-1], index)):
                    chains[tuple(self.trace.fqn_of(one) for one in chain)] = None
                    chain = []
                chain += [index] if fits else []
        return [list(chain) for chain in chains if len(chain) > 1]

    def _inside(self, modules: tuple[str, ...], singles: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the outermost modules inside a region that may be checkpointed and hold enough."""
        around = self.regions.calls_of(modules)
        inside = [one for one in singles if one != modules and self._lies_in(one, around)]
        within = {fqn for (fqn,) in inside}
        return [one for one in inside if not any(one[0].startswith(f"{other}.") for other in within)]

    def _lies_in(self, one: tuple[str, ...], around: Sequence[RegionCall]) -> bool:
        calls = self.regions.calls_of(one)
        return all(any(self.regions.contains(outer, call) for outer in around) for call in calls)

    def _option(self, chosen: tuple[Region, ...]) -> Option:
        calls = self.regions.calls_of(chosen[0].modules)
        inside = [call for region in chosen[1:] for call in self.regions.calls_of(region.modules)]
        kept = {call: self.regions.kept_ops(call, chosen[0].keep) for call in calls}
        again = tuple(
            one
            for call in calls
            for one in recomputations(
                self.regions, call, kept[call], [c for c in inside if self.regions.contains(call, c)]
            )
        )
        seconds = sum(float(self.weighted[one.rerun].sum()) for one in again)
        seconds += sum(overhead_seconds(self.trace, self.costs, one) for one in again)
        if not chosen[0].offload:
            return Option(chosen, kept, again, seconds)
        moved = {call: transfers(self.regions, call, kept[call], chosen[0].prefetch) for call in calls}
        seconds += sum(
            repeats_of(self.trace, call) * stall_seconds(self.regions, self.costs, self.seconds, call, moved[call])
            for call in calls
        )
        sent = tuple(one for call in calls for one in moved[call])
        return Option(chosen, kept, again, seconds, sent, host_bytes(self.regions, sent))

    def _keeps(self, region: RegionCall, most: int) -> list[Keep]:
        """Return the sets of operators to keep; regions of the same operators share them."""
        ops = self.trace.ops[region.start : region.stop]
        structure = (tuple((op.name, op.signature) for op in ops), region.cut - region.start)
        if structure not in self.keeps_like:
            found = self._keep_sets(region, list(self._worth(region)), most)
            self.keeps_like[structure] = [
                tuple(sorted(self.regions.op_key(region, op) for op in kept)) for kept in found
            ]
        return self.keeps_like[structure]

    def _keep_sets(self, region: RegionCall, worth: list[Worth], most: int) -> list[tuple[int, ...]]:
        if 0 < len(worth) <= FEW_OPERATORS:
            nothing, *each = np.array([self._added_bytes(region, kept) for kept in ((), *((w.op,) for w in worth))])
            found = every_keep_set(worth, nothing, np.array(each) - nothing)
            if len(found) <= most:
                return found
        return keep_sets(worth, most)

    def _added_bytes(self, region: RegionCall, kept: tuple[int, ...]) -> Ints:
        (again,) = recomputations(self.regions, region, frozenset(kept))
        return added_bytes(self.regions, again, self.workspace)

    def _worth(self, region: RegionCall) -> Iterator[Worth]:
        """Return what it takes and saves to keep each operator's output.

        Operators that draw random numbers are never kept: those after them would draw others.
        """
        trace = self.trace
        for op in range(region.start, region.cut):
            record, born = trace.ops[op], trace.births[op]
            nbytes = sum(trace.storages[s].nbytes for s in born)
            if record.name == _CAST and trace.precision != "32-true":
                continue  # autocast casts a weight that several modules share once, but again in each recomputation
            if nbytes and not record.random and not record.mutates and not self.mutated.intersection(born):
                yield Worth(op, self._extra_bytes(region, born), float(self.seconds[op]))

    def _extra_bytes(self, region: RegionCall, born: Sequence[int]) -> int:
        """Return the bytes that are not alive until the recomputation anyway."""
        storages, saves = self.trace.storages, self.trace.saves
        inside = set(region.saves)
        total = 0
        for storage in born:
            held = any(
                saves[s].death >= region.recompute_at for s in self.regions.saves_of_storage[storage] if s not in inside
            )
            total += 0 if held or storages[storage].release >= region.recompute_at else storages[storage].nbytes
        return total

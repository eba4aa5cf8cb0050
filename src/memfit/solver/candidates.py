"""Candidates for checkpointing: modules alone, in runs or nested, with the operators that each region can keep."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.ir import (
    CostTable,
    Keep,
    Op,
    Recomputation,
    Region,
    RegionCall,
    Regions,
    Transfer,
    enclosing,
    pareto,
)

Ints = npt.NDArray[np.int64]
_LEAST_SHARE = 0.002
_NESTED_LEAST_SHARE = 0.05
_ALIKE = 5.0  # times what one module of those alike holds, they must hold for it to count as more
_KEEP_SETS = 768
_MOST_KEEP_SETS, _LEAST_KEEP_SETS = 128, 5
_LONGEST_CHAIN = 24
_OFFLOADED_KEEP_SETS = 6
_CAST = "aten._to_copy.default"
_FEW_OPERATORS = 12  # for up to as many all sets are enumerated, and the bytes of the recomputation count too
_MOST_STATES = 256


@dataclass(frozen=True)
class Option:
    """One option to checkpoint a region."""

    regions: tuple[Region, ...]  # the region, and those inside it
    kept: dict[RegionCall, frozenset[int]]  # for each call of the region, the operators whose outputs it keeps
    recomputations: tuple[Recomputation, ...]
    seconds: float  # that it adds to the step
    transfers: tuple[Transfer, ...] = ()  # of storages that wait in host memory
    host_bytes: int = 0  # of these storages

    def transfers_of(self, region: RegionCall) -> list[Transfer]:
        return [t for t in self.transfers if t.call in region.calls]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the outermost region."""
        return self.regions[0].modules

    @property
    def is_whole(self) -> bool:
        """Whether one module is recomputed as a whole, once."""
        return self.regions == (Region(self.modules[:1]),)


def refusals(regions: Regions, reruns: Collection[str] = ()) -> dict[str, str]:
    """Return the reasons why modules can't be checkpointed, by FQN: their side effects would happen twice.

    Args:
        reruns: FQNs of modules that run again in the backward pass by themselves, and save only what they are given:
            regions around them are as those around any other module.
    """
    trace = regions.trace

    def writes(op: Op, region: RegionCall) -> bool:  # to a storage from before, but for running statistics
        mutated = [storage for storage in map(trace.storages.__getitem__, op.mutates) if storage.birth < region.start]
        return any(
            storage.category != "buffers" or storage.owner < 0 or not trace.modules[storage.owner].tracks_statistics
            for storage in mutated
        )

    refused: dict[str, str] = {}
    again = {trace.modules[c.module].fqn for c in trace.calls if c.phase == "recompute"}
    checkpointed = {fqn for fqn in again if enclosing(fqn).isdisjoint(reruns)}
    for fqn, calls in regions.calls.items():
        if any(f"{fqn}.".startswith(f"{other}.") or other.startswith(f"{fqn}.") for other in checkpointed):
            refused[fqn] = "is checkpointed by the model itself"
            continue
        for region in calls:
            if trace.modules[trace.calls[region.calls[0]].module].refuses_hooks:
                refused[fqn] = "runs a transform of torch.func, and PyTorch can't recompute inside of one"
                break
            if trace.ops[region.recompute_at].phase == "forward":
                refused[fqn] = "is differentiated within the loss, so the loss would run it again"
            elif changed := next(filter(None, (trace.calls[c].changed for c in region.calls)), ""):
                refused[fqn] = f"reads {changed}, and this has changed before it would run again"
            elif culprit := next((op.name for op in trace.ops[region.start : region.stop] if writes(op, region)), ""):
                refused[fqn] = f"writes to tensors made before it ({culprit}), and a recomputation would write again"
    return refused


def options(
    regions: Regions,
    costs: CostTable,
    excluded: Collection[str] = (),
    *,
    offload: bool = False,
    reruns: Collection[str] = (),
) -> list[Option]:
    """Return every option to checkpoint each allowed region that holds enough bytes.

    They are: modules alone, as a whole and with each undominated set of operators kept (`keep_sets`); runs of
    modules called one after the other; and both with the modules inside checkpointed again, or with their kept tensors
    in host memory.

    Args:
        excluded: FQNs of modules to leave out.
        reruns: As `refusals` has them.
    """
    finder = _Finder(regions, costs, excluded, reruns)
    resident = list(finder.options())
    return [*resident, *finder.offloading(resident)] if offload else resident


class _Finder:
    def __init__(
        self, regions: Regions, costs: CostTable, excluded: Collection[str], reruns: Collection[str] = ()
    ) -> None:
        self.regions, self.trace, self.costs = regions, regions.trace, costs
        trace = regions.trace
        refused = refusals(regions, reruns)
        self.allowed = {fqn for fqn in regions.calls if fqn and fqn not in refused and fqn not in excluded}
        self.seconds, self.workspace = costs.op_seconds(trace), costs.op_workspaces(trace).tolist()
        self.weighted = self.seconds * trace.repeats
        self.forward_bytes = sum(s.nbytes for s in trace.storages if s.category == "activations")
        self.mutated = {m for op in trace.ops for m in op.mutates}
        self.keeps_like: dict[tuple[object, ...], list[Keep]] = {}
        self.droppable_bytes: dict[tuple[str, ...], int] = {}
        self.alike = Counter[tuple[object, ...]]()  # runs of modules with the same names but for numbers, and bytes

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
            if self._share(modules) >= _NESTED_LEAST_SHARE:
                inside = self._inside(modules, singles)
                if len(inside) > 1:
                    yield self._option((Region(modules), *(Region(each) for each in inside)))

    def offloading(self, resident: Iterable[Option]) -> Iterator[Option]:
        """Yield options with their kept tensors in host memory; only some of the options that keep operators.

        Options that keep only arguments also come with late copies back: when the region is recomputed, which waits.
        Regions inside take what was copied back, and keep nothing in host memory themselves.
        """
        some: dict[tuple[str, ...], set[Keep]] = {}
        for region, *inside in (option.regions for option in resident):
            first = self.regions.calls_of(region.modules)[0]
            if region.modules not in some:
                some[region.modules] = {(), *self._keeps(first, _OFFLOADED_KEEP_SETS)}
            if region.keep in some[region.modules]:
                for prefetch in dict.fromkeys((self._prefetch(region), *(() if region.keep else ("",)))):
                    option = self._option((replace(region, offload=True, prefetch=prefetch), *inside))
                    if option.transfers:
                        yield option

    def _prefetch(self, region: Region) -> str:
        """Return the first module whose backward pass is long enough to hide a region's copies back.

        It must follow each call of the region. If none is long enough, it is the last one that does.
        """
        first, *later_calls = self.regions.calls_of(region.modules)
        kept = self.regions.kept_ops(first, region.keep)
        module = ""
        later = [set(map(self.trace.fqn_of, self.regions.later_siblings(call))) for call in later_calls]
        for fqn in map(self.trace.fqn_of, self.regions.later_siblings(first)):
            moved = self.regions.transfers(first, kept, fqn)
            if moved and moved[0].fetched >= 0 and all(fqn in followers for followers in later):
                module = fqn
                if self.regions.fetch_stall_seconds(self.costs, self.seconds, first, moved) == 0:
                    break
        return module

    def _worthwhile(self, runs: Iterator[tuple[str, ...]], seen: Collection[object] = ()) -> list[tuple[str, ...]]:
        worthwhile: list[tuple[str, ...]] = []
        extents = set(seen)
        found = list(runs)
        self.alike.update(map(self._kind, found))
        for modules in found:
            extent = self._extent(modules)
            if extent not in extents and self._share(modules) >= _LEAST_SHARE:
                extents.add(extent)
                worthwhile.append(modules)
        return worthwhile

    def _share(self, modules: tuple[str, ...]) -> float:
        """Return the share of the forward pass's bytes that a run holds.

        Of a deep model each module holds little, and those alike nearly everything: a part of what they hold counts.
        """
        apart = self.alike[self._kind(modules)] / len(modules)  # runs of repeated modules overlap
        alike = max(1.0, apart / _ALIKE)
        return self._droppable_bytes(modules) * alike / max(1, self.forward_bytes)

    def _kind(self, modules: tuple[str, ...]) -> tuple[object, ...]:
        return *(re.sub(r"\d+", "#", fqn) for fqn in modules), self._droppable_bytes(modules)

    def _extent(self, modules: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((r.start, r.stop) for r in self.regions.calls_of(modules))

    def _droppable_bytes(self, modules: tuple[str, ...]) -> int:
        if modules not in self.droppable_bytes:
            storages, saves = self.trace.storages, self.trace.saves
            calls = self.regions.calls_of(modules)
            born = {saves[s].storage for r in calls for s in r.saves if storages[saves[s].storage].birth >= r.start}
            self.droppable_bytes[modules] = sum(storages[s].nbytes for s in born)
        return self.droppable_bytes[modules]

    def _runs(self) -> Iterator[tuple[str, ...]]:
        """Yield runs of modules called one after the other; of long chains, only some."""
        siblings: dict[int, list[int]] = defaultdict(list)
        for index, call in enumerate(self.trace.calls):
            if call.phase == "forward" and call.microbatch == 0 and call.parent >= 0:
                siblings[call.parent].append(index)
        chains: dict[tuple[str, ...], None] = {}  # the longest runs of modules that may be checkpointed
        for calls in siblings.values():
            chain: list[int] = []
            for index in [*calls, -1]:
                fits = index >= 0 and self.trace.fqn_of(index) in self.allowed
                if chain and not (fits and self.regions.follows(chain[-1], index)):
                    chains[tuple(self.trace.fqn_of(call) for call in chain)] = None
                    chain = []
                chain += [index] if fits else []
        for names in chains:
            count = len(names)
            stride = -(-count // _LONGEST_CHAIN)
            for length in range(2, count + 1):
                if length <= _LONGEST_CHAIN // 2 or length % stride == 0:
                    for start in range(0, count - length + 1, stride):
                        with contextlib.suppress(KeyError):  # they are not always called together
                            self.regions.calls_of(names[start : start + length])
                            yield names[start : start + length]

    def _inside(self, modules: tuple[str, ...], singles: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the outermost modules inside a region that may be checkpointed and hold enough bytes."""
        around = self.regions.calls_of(modules)
        inside = [
            single
            for single in singles
            if single != modules
            and all(any(self.regions.contains(o, call) for o in around) for call in self.regions.calls_of(single))
        ]
        within = {fqn for (fqn,) in inside}
        return [single for single in inside if not any(single[0].startswith(f"{fqn}.") for fqn in within)]

    def _option(self, chosen: tuple[Region, ...]) -> Option:
        calls = self.regions.calls_of(chosen[0].modules)
        inside = [call for region in chosen[1:] for call in self.regions.calls_of(region.modules)]
        kept = {call: self.regions.kept_ops(call, chosen[0].keep) for call in calls}
        reruns = tuple(
            rerun
            for call in calls
            for rerun in self.regions.recomputations(
                call, kept[call], [c for c in inside if self.regions.contains(call, c)]
            )
        )
        seconds = sum(float(self.weighted[r.rerun].sum()) for r in reruns)
        seconds += sum(self.regions.repeats_of(r.region) * r.overhead_seconds(self.costs, self.trace) for r in reruns)
        if not chosen[0].offload:
            return Option(chosen, kept, reruns, seconds)
        moved = {
            call: self.regions.transfers(
                call, kept[call], chosen[0].prefetch, [c for c in inside if self.regions.contains(call, c)]
            )
            for call in calls
        }
        seconds += sum(
            self.regions.repeats_of(call) * self.regions.stall_seconds(self.costs, self.seconds, call, moved[call])
            for call in calls
        )
        sent = tuple(transfer for call in calls for transfer in moved[call])
        return Option(chosen, kept, reruns, seconds, sent, self.regions.host_bytes(sent))

    def _keeps(self, region: RegionCall, most: int) -> list[Keep]:
        """Return the sets of operators to keep; regions with the same operators share them."""
        ops = self.trace.ops[region.start : region.stop]
        structure = (tuple((op.name, op.signature) for op in ops), region.cut - region.start)
        if structure not in self.keeps_like:
            worth, again = list(self._worth(region)), None
            if 0 < len(worth) <= _FEW_OPERATORS:
                kept_sets = [frozenset[int](), *(frozenset({w.op}) for w in worth)]
                reruns = (rerun for kept in kept_sets for rerun in self.regions.recomputations(region, kept))
                nothing, *each = np.array([self.regions.added_bytes(rerun, self.workspace) for rerun in reruns])
                again = nothing, np.array(each) - nothing
            names = (sorted(self.regions.op_key(region, op) for op in kept) for kept in keep_sets(worth, most, again))
            self.keeps_like[structure] = [tuple(of_set) for of_set in names]
        return self.keeps_like[structure]

    def _worth(self, region: RegionCall) -> Iterator[Worth]:
        """Yield the bytes and seconds of keeping each operator's output.

        Operators that draw random numbers are never kept, since later ones would draw other numbers. Bytes that would
        be alive until the recomputation anyway do not count.
        """
        storages, saves, at = self.trace.storages, self.trace.saves, region.recompute_at
        inside = set(region.saves)
        for op in range(region.start, region.cut):
            record, born = self.trace.ops[op], self.trace.births[op]
            if record.name == _CAST:  # autocast, a loop's own too, casts a weight that several modules share once,
                continue  # but again in each recomputation
            is_fixed = record.random or record.mutates or self.mutated.intersection(born)
            if is_fixed or not sum(storages[s].nbytes for s in born):
                continue
            outside = {s: [i for i in self.regions.saves_of_storage[s] if i not in inside] for s in born}
            dying = (s for s in born if storages[s].release < at and all(saves[i].death < at for i in outside[s]))
            yield Worth(op, sum(storages[s].nbytes for s in dying), float(self.seconds[op]))


class Worth(NamedTuple):
    """The bytes and seconds of keeping an operator's output."""

    op: int
    nbytes: int
    seconds: float


class _State(NamedTuple):
    nbytes: int
    seconds: float
    kept: int


def keep_sets(worth: Sequence[Worth], most: int, again: tuple[Ints, Ints] | None = None) -> list[tuple[int, ...]]:
    """Return the sets of operators to keep that are undominated in bytes and seconds, by increasing bytes.

    Keeping an output takes its bytes from the forward pass to the recomputation, and saves the seconds of its operator.
    Both are sums over the set, so that the sets worth considering are the Pareto set of a knapsack. It is built one
    operator after the other (Nemhauser and Ullmann, 1969, Discrete Dynamic Programming and Capital Allocation),
    dropping dominated sets at each step. Where there are more than `most`, as many of them are returned, spread evenly
    over the seconds saved.

    Args:
        again: The bytes that the recomputation adds at each of its operators with no output kept, and their changes by
            keeping each of few operators' outputs, in a row for each. Every set is then looked at, and those are
            returned that are undominated in these bytes too, where there are no more than `most`.
    """
    if again is not None:
        added, changes = again
        kept = np.arange(1 << len(worth))[:, np.newaxis] >> np.arange(len(worth)) & 1
        nbytes, seconds = kept @ [w.nbytes for w in worth], kept @ [w.seconds for w in worth]
        peaks = (added + kept @ changes).max(axis=1)
        undominated: list[int] = []
        for candidate in np.lexsort((peaks, -seconds, nbytes)):  # dominating sets come first
            if not np.any((seconds[undominated] >= seconds[candidate]) & (peaks[undominated] <= peaks[candidate])):
                undominated.append(int(candidate))
        found = [
            tuple(sorted(worth[int(bit)].op for bit in np.flatnonzero(kept[each]))) for each in undominated if each
        ]
        if len(found) <= most:
            return found
    ranked = sorted(worth, key=lambda w: (w.nbytes / max(w.seconds, 1e-12), w.op))
    states = [_State(0, 0.0, 0)]
    for bit, one in enumerate(ranked):
        grown = [_State(s.nbytes + one.nbytes, s.seconds + one.seconds, s.kept | 1 << bit) for s in states]
        states = _spread(pareto([*states, *grown], lambda s: s.nbytes, lambda s: -s.seconds), _MOST_STATES)
    chosen = _spread([s for s in states if s.kept], most)
    return [tuple(sorted(w.op for bit, w in enumerate(ranked) if s.kept >> bit & 1)) for s in chosen]


def _spread(states: list[_State], most: int) -> list[_State]:
    """Return at most `most` states, including the first and the last, about evenly spaced in seconds."""
    if len(states) <= most:
        return states
    step = (states[-1].seconds - states[0].seconds) / max(1, most - 1)
    chosen = [states[0]]
    for state in states[1:-1]:
        if state.seconds >= chosen[-1].seconds + step * 0.999:
            chosen.append(state)
    return [*chosen[: most - 1], states[-1]]

"""What activation checkpointing of a region changes: what dies early, what runs again, what is born again.

The model follows non-reentrant `torch.utils.checkpoint`, with early stopping and selective contexts.
For each forward call of a region:

1. Nothing that autograd saves inside is kept, but for the outputs of the operators in `keep`.
2. The call's tensor arguments are kept until the last of its saves dies.
3. When the backward pass first unpacks a save of the call, its operators run again up to the last
   save, without those in `keep`; what they allocate lives until the forward pass would have released
   it, or, where saved, until the backward pass lets go of that save.
4. The state of the CPU's random generator is kept from the call until its last save dies, and another
   one while its operators run again.
"""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from memfit.ir.trace import Trace

Keep = tuple[str, ...]
"""Operators whose outputs a region keeps, each as "overload#occurrence" within one call of the region."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Modules whose activations are recomputed together.

    Attributes:
        modules: Their FQNs in the model: one, or several that are called one after the other.
        keep: Operators whose outputs are kept all the same, as "overload#occurrence" within one call.
    """

    modules: tuple[str, ...]
    keep: Keep = ()


_GENERATOR_STATE_BYTES = 5056


@dataclass(frozen=True)
class RegionCall:
    """One forward call of a region.

    Attributes:
        call: Index into `Trace.calls`.
        start: The first operator that runs again.
        cut: One past the last operator that runs again.
        recompute_at: The backward operator just before which the recomputation runs.
        end: The operator after which the last save of the call is let go of.
        saves: Indices into `Trace.saves`.
        inputs: Storages of the call's tensor arguments.
    """

    call: int
    start: int
    cut: int
    recompute_at: int
    end: int
    saves: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Recomputations run in this order."""
        return (self.recompute_at, -self.start)


@dataclass(frozen=True)
class Copy:
    """A storage born again: alive from a position in its recomputation.

    Attributes:
        storage: The storage of which it is a copy.
        born: The forward operator that allocates it again.
        released: The last forward operator of the recomputation at which it is alive.
        death: The backward operator after which it is let go of; -1 if it ends within the recomputation.
    """

    storage: int
    born: int
    released: int
    death: int


class Regions:
    """The regions of a trace, each a module FQN that is called in the forward pass.

    Attributes:
        generator_state_bytes: What the state of the CPU's generator takes of the device's memory.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.generator_state_bytes = _GENERATOR_STATE_BYTES if trace.device == "cpu" else 0
        self.saves_of: dict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(trace.saves):
            for around in trace.call_chain(save.call):
                self.saves_of[around].append(index)
        self.saves_of_storage: dict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(trace.saves):
            self.saves_of_storage[save.storage].append(index)
        self.calls: dict[str, list[RegionCall]] = defaultdict(list)
        for index, call in enumerate(trace.calls):
            region = self._region_call(index) if call.phase == "forward" else None
            if region is not None:
                self.calls[trace.modules[call.module].fqn].append(region)

    def calls_of(self, modules: tuple[str, ...]) -> list[RegionCall]:
        """Return the calls of a region.

        Raises:
            KeyError: It has none that could be checkpointed.
        """
        (fqn,) = modules
        if fqn not in self.calls:
            raise KeyError(fqn)
        return self.calls[fqn]

    def _region_call(self, index: int) -> RegionCall | None:
        call = self.trace.calls[index]
        saves = [s for s in self.saves_of[index] if self.trace.saves[s].unpacked >= 0]
        if not saves or call.end <= call.start:
            return None
        records = [self.trace.saves[s] for s in saves]
        return RegionCall(
            call=index,
            start=call.start,
            cut=min(max(r.at for r in records), call.end),
            recompute_at=min(r.unpacked for r in records),
            end=max(r.death for r in records),
            saves=tuple(saves),
            inputs=call.inputs,
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

    def kept_ops(self, region: RegionCall, keep: Keep) -> set[int]:
        """Return the operators of a region call that `keep` names."""
        if not keep:
            return set()
        wanted = set(keep)
        end = self.trace.calls[region.call].end
        return {op for op in range(region.start, end) if self.op_key(region, op) in wanted}

    def rerun(self, region: RegionCall, kept: set[int]) -> list[int]:
        """Return the operators that run again."""
        return [op for op in range(region.start, region.cut) if op not in kept]

    def copies(self, region: RegionCall, kept: set[int]) -> list[Copy]:
        """Return the storages born again."""
        found = []
        saved = defaultdict(list)
        for index in region.saves:
            save = self.trace.saves[index]
            saved[save.storage].append(save.death)
        for op in self.rerun(region, kept):
            for storage in self.trace.births[op]:
                found.append(Copy(storage, op, self.released(region, storage), max(saved[storage], default=-1)))
        return found

    def released(self, region: RegionCall, storage: int) -> int:
        """Return the last forward operator of a recomputation that holds a storage made, or kept, in the region."""
        record = self.trace.storages[storage]
        return min(max(record.release, record.birth), region.cut - 1)


@dataclass(frozen=True)
class Keeper:
    """A reason for which a storage outlives its release: through operator `end`.

    Attributes:
        end: The last operator at which this reason keeps it.
        lost_in: Region calls that, when checkpointed, take the reason away, unless they keep the
            operator that made the storage.
        needs: The region call that must be checkpointed for the reason to exist, or -1.
    """

    end: int
    lost_in: frozenset[int]
    needs: int


def keepers(regions: Regions, storage: int, takers: Iterable[RegionCall]) -> list[Keeper]:
    """Return why a storage outlives its release.

    Autograd's saves are lost in a region that makes the storage again, or that holds it as an argument;
    a storage from elsewhere that is no argument is held by someone else anyway.

    Args:
        regions: The regions of the trace.
        storage: Index into `Trace.storages`.
        takers: The region calls that take the storage as an argument.
    """
    trace = regions.trace
    birth = trace.storages[storage].birth
    reasons = [Keeper(region.end, frozenset(), region.call) for region in takers]
    for index in regions.saves_of_storage[storage]:
        save = trace.saves[index]
        chain = trace.call_chain(save.call)
        lost_in = frozenset(c for c in chain if birth >= trace.calls[c].start or storage in trace.calls[c].inputs)
        reasons.append(Keeper(save.death, lost_in, -1))
    return reasons

"""The parts of a step that can be checkpointed: modules, and runs of modules called one after the other."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.ir.display import Shown
from memfit.ir.trace import Trace

Keep = tuple[str, ...]
"""Operators whose outputs a region keeps, each as "overload#occurrence" within one call of the region."""


class Region(Shown, frozen=True, forbid_unknown_fields=True):
    """Modules whose activations are recomputed together.

    Attributes:
        modules: FQNs in the model: one, or several that are called one after the other.
        keep: Operators whose outputs are kept nevertheless, as "overload#occurrence" within one call.
        offload: Whether the tensors kept for the backward pass, arguments and outputs in `keep`, wait in host memory.
        prefetch: The FQN of a module called later by the same parent: when its backward pass starts, the tensors are
            copied back. "" to copy them back when the region is recomputed, which then waits for them.
    """

    modules: tuple[str, ...]
    keep: Keep = ()
    offload: bool = False
    prefetch: str = ""


def enclosing(fqn: str) -> set[str]:
    """Return the FQNs of a module and of those around it, the model's own, "", included."""
    parts = fqn.split(".")
    return {"", *(".".join(parts[: n + 1]) for n in range(len(parts)))}


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
        for index, save in enumerate(trace.saves):
            for around in trace.call_chain(save.call):
                self.saves_of[around].append(index)
        self.saves_of_storage: dict[int, list[int]] = defaultdict(list)
        for index, save in enumerate(trace.saves):
            self.saves_of_storage[save.storage].append(index)
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
            self._runs[modules] = self._run_calls(modules)
        if not self._runs[modules]:
            raise KeyError(", ".join(modules))
        return self._runs[modules]

    def _run_calls(self, modules: tuple[str, ...]) -> list[RegionCall]:
        """Return the calls of a run of modules; none if they are not always called together."""
        together = list(zip(*(self._forward[fqn] for fqn in modules), strict=False))
        if any(len(self._forward[fqn]) != len(together) for fqn in modules):
            return []
        if not all(self.follows(a, b) for calls in together for a, b in itertools.pairwise(calls)):
            return []
        region_calls = [self._region_call(calls) for calls in together]
        return [region for region in region_calls if region is not None]

    def follows(self, call: int, later: int) -> bool:
        """Tell whether a module call comes just after another, with no operator in between."""
        first, second = self.trace.calls[call], self.trace.calls[later]
        return first.parent == second.parent and first.microbatch == second.microbatch and first.end == second.start

    def _region_call(self, calls: tuple[int, ...]) -> RegionCall | None:
        first, last = self.trace.calls[calls[0]], self.trace.calls[calls[-1]]
        saves = [s for call in calls for s in self.saves_of[call] if self.trace.saves[s].unpacked >= 0]
        if not saves or last.end <= first.start:
            return None
        records = [self.trace.saves[s] for s in saves]
        inputs = dict.fromkeys(s for call in calls for s in self.trace.calls[call].inputs)
        return RegionCall(
            calls=calls,
            start=first.start,
            stop=last.end,
            cut=min(max(r.at for r in records), last.end),
            recompute_at=min(r.unpacked for r in records),
            end=max(r.death for r in records),
            saves=tuple(saves),
            inputs=tuple(s for s in inputs if self.trace.storages[s].birth < first.start),
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

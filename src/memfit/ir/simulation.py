"""The one definition of a plan's peak bytes and recomputed seconds, on a trace."""

from __future__ import annotations

import copy as copies
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.ir.caching_allocator import AllocationEvent
from memfit.ir.costs import CostTable
from memfit.ir.levers import Region
from memfit.ir.operators import (
    COPY_IN,
    COPY_OUT,
    GATHER,
    SHARDS_IN,
    SHARDS_OUT,
    SMALL_BYTES,
    WAIT,
    Collective,
    among_ranks,
    is_collective,
)
from memfit.ir.regions import Keepers, Recomputation, RegionCall, Regions, Transfer
from memfit.ir.timeline import TIMELINE_CATEGORIES, WORKSPACE, Timeline
from memfit.ir.trace import Trace

_SCRATCH = -1  # names of storages that are not in the trace
_RESIDENT = -2
_SECOND = -10  # numbers from here down are of storages whose own number is that of the last step's
_OF_THE_PROGRAM = ("_spans", "_is_run", "_meets", "_copies")


def simulate(trace: Trace, costs: CostTable, regions: Sequence[Region] = ()) -> Timeline:
    """Return the timeline of a step with some regions checkpointed.

    Args:
        regions: Regions to checkpoint; regions with others inside keep nothing.

    Raises:
        KeyError: A region has no forward call that could be checkpointed.
    """
    return Replay(trace, costs, regions).timeline()


def allocations(
    trace: Trace, costs: CostTable, regions: Sequence[Region] = (), steps: int = 2
) -> list[AllocationEvent]:
    """Return the allocations and frees of a program that runs steps, in order, for `replay`.

    Parameters, buffers and the batch come first; the optimizer makes its state in the first step, and the backward pass
    the gradients that stay. What a step leaves to the next stays where it was made, such as gradients that are dropped
    later, or outputs that the loop holds: elsewhere it would leave other gaps.

    Args:
        trace: A steady step, without `regions`.
        regions: Regions to checkpoint; regions with others inside keep nothing.

    Raises:
        KeyError: A region has no forward call that could be checkpointed.
    """
    return list(Replay(trace, costs, regions).allocations(steps))


class Life(NamedTuple):
    """A storage, alive from point `first` (-1: before the step) through point `last`."""

    name: int
    nbytes: int
    category: str
    first: int
    last: int


class Replay:
    """A trace with recomputations inserted: its operators in their new order, and the lives of its storages.

    Attributes:
        points: The operator of each point of the new step, and its recomputation; None for the captured ones.
        position: The point of each operator of the trace, and one past the last.
    """

    def __init__(self, trace: Trace, costs: CostTable, regions: Sequence[Region]) -> None:
        self.trace, self.costs, self._asked = trace, costs, tuple(regions)
        self.regions = Regions(trace)
        named = {call: region for region in regions for call in self.regions.calls_of(region.modules)}
        outermost = [call for call in named if not any(self.regions.contains(outer, call) for outer in named)]
        self.kept = {call: self.regions.kept_ops(call, named[call].keep) for call in outermost}
        self.moved: dict[RegionCall, tuple[Transfer, ...]] = {}
        found: list[Recomputation] = []
        for region in outermost:
            inside = [call for call in named if self.regions.contains(region, call)]
            if named[region].offload:
                prefetch = named[region].prefetch
                self.moved[region] = self.regions.transfers(region, self.kept[region], prefetch, inside)
            found += self.regions.recomputations(region, self.kept[region], inside)
        self.recomputations = sorted(found, key=lambda again: again.order)
        self.points: list[tuple[int, Recomputation | None]] = []
        self.position: list[int] = []
        self.segment: dict[RegionCall, int] = {}
        self.segment_end: dict[RegionCall, int] = {}
        pending = self.recomputations[::-1]
        for op in range(len(trace.ops)):
            while pending and pending[-1].region.recompute_at <= op:
                again = pending.pop()
                self.segment[again.region] = len(self.points)
                self.points += [(i, again) for i in range(again.region.start, again.cut)]
                self.segment_end[again.region] = len(self.points) - 1
            self.position.append(len(self.points))
            self.points.append((op, None))
        self.position.append(len(self.points))

    def lives(self) -> Iterator[Life]:
        """Yield the lives of storages, those that recomputations allocate again last."""
        storages = self.trace.storages
        for name, (storage, nbytes, category, first, last) in enumerate(self._lives):
            yield Life(name, storages[storage].nbytes if storage >= 0 else nbytes, category, first, last)

    @functools.cached_property
    def _lives(self) -> list[Life]:
        """The life of each storage, by its own number or that of the storage it copies; -1 for other memory."""
        trace, state_bytes = self.trace, self.regions.generator_state_bytes
        found: list[Life] = []

        def add(storage: int, first: int, last: int) -> None:
            record = trace.storages[storage]
            found.append(Life(storage, record.nbytes, record.category, first, last))

        keepers = Keepers(self.regions, self.kept)
        moves: dict[int, dict[RegionCall, Transfer]] = defaultdict(dict)
        for call, moved in self.moved.items():
            for move in moved:
                moves[move.storage][call] = move
        for index, storage in enumerate(trace.storages):
            first = -1 if storage.birth < 0 else self.position[storage.birth]
            add(index, first, self._last_point(index, keepers, moves.get(index, {})))
        for again in self.recomputations:
            region, start = again.region, self.segment[again.region]
            for copy in again.copies:
                last = start - region.start + copy.released
                if copy.death >= 0:
                    last = max(last, self.position[copy.death])
                if copy.taken_by is not None:
                    last = max(last, self.segment_end[copy.taken_by])
                add(copy.storage, start - region.start + copy.born, last)
            for move in self.moved.get(region, ()):  # what is copied back from host memory
                first = self.position[move.fetched - 1] + 1 if move.fetched >= 0 else start
                death = self.position[move.death] if move.death >= 0 else -1
                last = max(self.segment_end[region], death)
                if move.taken_by is not None:
                    last = max(last, self.segment_end[move.taken_by])
                add(move.storage, first, last)
            if state_bytes:  # of the generator: from each call until the last save dies, and while it recomputes
                for index in region.calls:
                    first, last = self.position[trace.calls[index].start], self.position[region.end]
                    found.append(Life(-1, state_bytes, "activations", first, last))
                last = max(start, self.segment_end[region])
                found.append(Life(-1, state_bytes * again.states, "activations", start, last))
        return found

    def _last_point(self, index: int, keepers: Keepers, moves: dict[RegionCall, Transfer]) -> int:
        """Return the last point at which the original of a storage is alive."""
        storage = self.trace.storages[index]
        if not self.kept or storage.birth < 0 or self.trace.ops[storage.birth].phase != "forward":
            return self.position[storage.death]
        ends = [self.position[storage.release], *(self.position[move.landed] for move in moves.values())]
        for keeper in keepers.of(index):
            lost = any(storage.birth not in self.kept[region] or region in moves for region in keeper.lost_in)
            if not lost and keeper.needs not in moves:
                ends.append(self.position[keeper.end])
        for region, kept in self.kept.items():  # kept outputs live until the recomputation takes them
            if storage.birth in kept and region not in moves:
                ends.append(self.segment[region] + self.regions.released(index, region.cut) - region.start)
        return max(ends)

    def under(self, costs: CostTable, trace: Trace | None = None) -> Replay:
        """Return the same replay with other costs, as on another device, or of another step of the same program.

        Only bytes and costs are other ones then: when storages are born and die is not replayed again.

        Args:
            trace: A step of the same program (`is_one_program`), as of other samples or ranks; None for the same.
        """
        if trace is not None and self.moved:  # what waits in host memory depends on its bytes
            return Replay(trace, costs, self._asked)
        of_the_trace = ("_total", "_signatures")
        for name in (*_OF_THE_PROGRAM, *(of_the_trace if trace is None else ())):
            getattr(self, name)  # copies share them
        other = copies.copy(self)
        other.costs = costs
        if trace is not None:
            other.trace = trace
            for name in (*of_the_trace, "_nbytes"):
                vars(other).pop(name, None)
        return other

    def allocations(self, steps: int = 2, *, is_labelled: bool = True) -> Iterator[AllocationEvent]:
        """Yield the allocations and frees of a program that runs steps, as `allocations` returns them.

        Args:
            is_labelled: Whether events say which operator they belong to, which takes a while to find.
        """
        return _Program(self, is_labelled).events(steps)

    @functools.cached_property
    def _ops(self) -> npt.NDArray[np.int64]:
        return np.array([op for op, _ in self.points], np.int64)

    @functools.cached_property
    def _signatures(self) -> npt.NDArray[np.int64]:
        return self.trace.op_signatures[self._ops]

    @functools.cached_property
    def _copies(self) -> bool:
        return any(op.name in (COPY_OUT, COPY_IN) for op in self.trace.ops)

    @functools.cached_property
    def _is_run(self) -> npt.NDArray[np.bool_]:
        """Whether the operator of each point runs there: what was kept does not run again."""
        return np.array([again is None or op not in again.kept for op, again in self.points], np.bool_)

    @functools.cached_property
    def _meets(self) -> list[int]:
        """The points at which something is sent or waited for: copies of shards, and updates after what was sent."""
        found: list[int] = []
        is_sent = False
        for point, index in enumerate(self._ops.tolist()):
            op = self.trace.ops[index]
            is_update = op.phase == "optimizer" and is_sent
            if is_update or is_collective(op.name) or op.name in (SHARDS_OUT, SHARDS_IN):
                found.append(point)
                is_sent = is_collective(op.name) or (is_sent and not is_update)
        return found

    @functools.cached_property
    def labels(self) -> list[str]:
        """The label of the operator at each point: "phase · module FQN · operator"."""
        ops = ((self.trace.ops[op], "recompute" if again else self.trace.ops[op].phase) for op, again in self.points)
        return [" · ".join(filter(None, (phase, self.trace.fqn_of(op.call), op.name))) for op, phase in ops]

    @functools.cached_property
    def _spans(self) -> npt.NDArray[np.int64]:
        """By life: its storage, the point at which it begins, and that at which it has ended."""
        count = len(self.points)
        spans = [(life.name, max(life.first, 0), min(life.last, count - 1) + 1) for life in self._lives]
        found: npt.NDArray[np.int64] = np.array(spans, np.int64).reshape(-1, 3).T
        return found

    @functools.cached_property
    def _nbytes(self) -> npt.NDArray[np.int64]:
        """The bytes of each life."""
        if self.regions.generator_state_bytes or not self.trace.storages:  # some lives are of no storage
            return np.array([life.nbytes for life in self.lives()], np.int64)
        found: npt.NDArray[np.int64] = self.trace.storage_bytes[self._spans[0]]
        return found

    @functools.cached_property
    def _total(self) -> npt.NDArray[np.int64]:
        """The bytes of storages alive at every point: the same under all costs."""
        return self._summed(self._nbytes)

    def _summed(self, nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes alive at every point, from the bytes of each life."""
        _, begins, ends = self._spans
        change = np.zeros(len(self.points) + 1, np.int64)
        np.add.at(change, begins, nbytes)
        np.subtract.at(change, ends, nbytes)
        return np.cumsum(change)[:-1]

    def workspaces(self) -> npt.NDArray[np.int64]:
        """Return the bytes that the operator of each point allocates beyond its outputs, resident ones left out."""
        of_signature = [self.costs.of(text).workspace_bytes for text in self.trace.signatures]
        found: npt.NDArray[np.int64] = np.array(of_signature, np.int64)[self._signatures] * self._is_run
        return found

    def peak_bytes(self) -> int:
        """Return the most bytes alive at a point."""
        return int((self._total + self.workspaces()).max()) + self.costs.resident_workspace_bytes

    def step_seconds(self) -> float:
        """Return the time of the whole step, with every microbatch."""
        return self._step_seconds(self._seconds())

    def _step_seconds(self, seconds: npt.NDArray[np.float64]) -> float:
        total = float(seconds @ self.trace.repeats[self._ops])
        if not self.moved:
            return total
        of_ops = self.costs.op_seconds(self.trace)
        return total + sum(
            self.regions.repeats_of(call) * self.regions.stall_seconds(self.costs, of_ops, call, moved)
            for call, moved in self.moved.items()
        )

    def timeline(self) -> Timeline:
        """Return memory and time at every point."""
        categories = np.array([life.category for life in self._lives])
        live = {name: self._summed(np.where(categories == name, self._nbytes, 0)) for name in TIMELINE_CATEGORIES}
        live[WORKSPACE] = self.workspaces() + self.costs.resident_workspace_bytes
        total = np.sum(list(live.values()), axis=0)
        peak, seconds = int(np.argmax(total)), self._seconds()
        return Timeline(
            live_bytes={name: values.tolist() for name, values in live.items()},
            labels=self.labels,
            modules=[self.trace.fqn_of(self.trace.ops[op].call) for op, _ in self.points],
            phases=["recompute" if again else self.trace.ops[op].phase for op, again in self.points],
            seconds=seconds.tolist(),
            peak_bytes=int(total[peak]),
            peak_index=peak,
            step_seconds=self._step_seconds(seconds),
        )

    def _seconds(self) -> npt.NDArray[np.float64]:
        """Return the seconds of each point, the overhead of a recomputation with its first one."""
        of_signature = [self.costs.seconds_of(text) for text in self.trace.signatures]
        found = np.array(of_signature, np.float64)[self._signatures] * self._is_run
        if self.trace.device != "cpu" and (self.trace.sharding is not None or self._copies):
            seconds: list[float] = found.tolist()
            if self.trace.sharding is not None:
                self._wait_for_ranks(seconds)
            if self._copies:
                self._wait_for_copies(seconds)
            found = np.array(seconds, np.float64)
        for op, overhead in self.costs.captured_overheads(self.trace).items():
            found[self.position[op]] += overhead
        for again in self.recomputations:
            found[self.segment[again.region]] += again.overhead_seconds(self.costs, self.trace)
        return found

    def _wait_for_copies(self, seconds: list[float]) -> None:
        """Have copies between host and device run in parallel until a wait."""
        now = sent = fetched = 0.0
        arrival: dict[int, float] = {}
        for point, (index, _) in enumerate(self.points):
            op = self.trace.ops[index]
            if op.name == COPY_OUT:
                sent, seconds[point] = max(sent, now) + seconds[point], 0.0
            elif op.name == COPY_IN:
                fetched = max(fetched, now) + seconds[point]
                arrival |= dict.fromkeys(op.mutates, fetched)
                seconds[point] = 0.0
            elif op.name == WAIT:  # for a copy to the device; without one, for all copies to the host
                there = max((arrival[s] for s in op.mutates), default=sent)
                seconds[point] = max(0.0, there - now)
            now += seconds[point]

    def _wait_for_ranks(self, seconds: list[float]) -> None:
        """Have collectives run beside the computation, one after the other, until something waits for them."""
        before = np.concatenate([[0.0], np.cumsum(seconds)])  # what the points take by themselves
        shift = 0.0  # of the time, by what is sent meanwhile and what is waited for
        free = reduced = 0.0  # when the communicator is through, and with the last reduction
        gathers: list[float] = []
        for point in self._meets:
            op = self.trace.ops[self._ops[point]]
            own, now = seconds[point], float(before[point]) + shift
            sent = among_ranks(self.trace.signatures[op.signature]) if is_collective(op.name) else None
            if isinstance(sent, Collective) and sent.nbytes > SMALL_BYTES:
                free, own = max(free, now) + own, 0.0
                if op.name == GATHER:
                    gathers.append(free)
                else:
                    reduced = free
            if op.phase == "optimizer":
                own += max(0.0, free - now)
            elif op.name == SHARDS_OUT and gathers:
                own += max(0.0, gathers.pop(0) - now)
            elif op.name == SHARDS_IN:
                own += max(0.0, reduced - now)
            shift += own - seconds[point]
            seconds[point] = own


class _Program:
    """The events of a program: a step's storages in the order in which they are allocated and freed."""

    def __init__(self, replay: Replay, is_labelled: bool) -> None:
        self.replay = replay
        count = len(replay.points)
        self.labels = replay.labels if is_labelled else [""] * count
        self.before: list[Life] = []
        self.state: list[Life] = []
        self.born: list[list[Life]] = [[] for _ in range(count)]
        self.accumulated: list[list[Life]] = [[] for _ in range(count)]
        self.dead: list[list[Life]] = [[] for _ in range(count)]
        self.ids: dict[int, int] = {}
        left = []
        for life in replay.lives():
            if life.first >= 0:
                self.born[life.first].append(life)
            else:
                (self.state if life.category == "optimizer state" else self.before).append(life)
            if life.last < count:
                self.dead[life.last].append(life)
            elif life.first >= 0:
                left.append(life)
        self.carried: dict[int, int] = {}  # the name in the next step, of the name in this
        self._carry(left, count)

    def _carry(self, left: list[Life], count: int) -> None:
        """Find the next step's storage for each one that a step leaves, and where lasting gradients are made."""
        trace = self.replay.trace

        def kind(life: Life) -> tuple[object, ...]:
            return life.category, life.nbytes, trace.storages[life.name].parameter

        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for life in left:
            if life.name < len(trace.storages):  # not made by a recomputation
                alike[kind(life)].append(life.name)
        for life in self.before:
            if life.last < count and alike[kind(life)]:
                self.carried[alike[kind(life)].pop(0)] = life.name
        for life in left:
            if life.name not in self.carried:
                self.dead[-1].append(life)
        writes: dict[int, int] = {}  # where the backward pass first adds to a storage
        for index, op in enumerate(trace.ops):
            if op.phase == "backward":
                for storage in op.mutates:
                    writes.setdefault(storage, self.replay.position[index])
        made_later = set(self.carried.values())
        for life in self.before:
            if life.category == "gradients" and life.last >= count and life.name in writes:
                self.accumulated[writes[life.name]].append(life)
                made_later.add(life.name)
        self.before = [life for life in self.before if life.name not in made_later]

    def events(self, steps: int) -> Iterator[AllocationEvent]:
        phases = [self.replay.trace.ops[op].phase for op, _ in self.replay.points]
        last = max((point for point, phase in enumerate(phases) if phase == "backward"), default=-1)
        makes_state = min(last + 1, len(phases) - 1)
        half = self.replay.costs.resident_workspace_bytes // 2  # half at the first operator of each pass
        firsts = [phases.index(phase) for phase in ("forward", "backward") if half and phase in phases]
        resident = {at: Life(_RESIDENT - i, half, WORKSPACE, at, at) for i, at in enumerate(firsts)}
        workspaces = self.replay.workspaces().tolist()
        at_points = list(zip(self.born, workspaces, self.dead, self.accumulated, strict=True))
        for step in range(steps):
            yield from self._made(-1, self.before)
            for point, (born, workspace, dead, accumulated) in enumerate(at_points):
                if point == makes_state:
                    yield from self._made(point, self.state)
                if point in resident and not step:
                    yield self._event(point, resident[point], True)
                written_over = -workspace  # bytes of dying storages that a kernel writes its outputs over
                for life in sorted(dead, key=lambda life: -life.nbytes) if written_over > 0 else ():
                    if written_over >= life.nbytes > 0 and life.first < point:
                        written_over -= life.nbytes
                        yield self._event(point, life, False)
                for life in born:
                    yield self._event(point, life, True)
                if workspace > 0:
                    scratch = Life(_SCRATCH, workspace, WORKSPACE, point, point)
                    yield self._event(point, scratch, True)
                    yield self._event(point, scratch, False)
                for life in dead:
                    if life.name in self.ids:
                        yield self._event(point, life, False)
                yield from self._made(point, accumulated)
            for name, following in self.carried.items():
                self.ids[following] = self.ids.pop(name)

    def _made(self, point: int, lives: list[Life]) -> Iterator[AllocationEvent]:
        return (self._event(point, life, True) for life in lives if life.name not in self.ids)

    def _event(self, point: int, life: Life, alloc: bool) -> AllocationEvent:
        if alloc:  # under another number than its own where the last step's still has that
            following = self.carried.get(life.name)
            is_taken = following is not None and self.ids.get(following) == life.name
            number = self.ids[life.name] = _SECOND - life.name if is_taken else life.name
        else:
            number = self.ids.pop(life.name)
        label = self.labels[point] if point >= 0 else life.category
        return AllocationEvent(point, number, life.nbytes, alloc, life.category, label)

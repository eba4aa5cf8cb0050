"""The allocations and frees of a program that runs steps, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from memfit.ir.caching_allocator import AllocationEvent
from memfit.ir.costs import CostTable
from memfit.ir.regions import Region
from memfit.ir.simulation import Life, Replay
from memfit.ir.timeline import WORKSPACE
from memfit.ir.trace import Trace

_SCRATCH = -1  # names of storages that are not in the trace
_RESIDENT = -2
_SECOND = -10  # numbers from here down are of storages whose own number is that of the last step's


def allocations(
    trace: Trace, costs: CostTable, regions: Sequence[Region] = (), steps: int = 2
) -> list[AllocationEvent]:
    """Return the allocations and frees of a program that runs steps, in order, for `allocator.replay`.

    Parameters, buffers and the batch come first; the optimizer makes its state in the first step, and the backward pass
    the gradients that stay. What a step leaves to the next stays where it was made, such as gradients that are dropped
    later, or outputs that the loop holds: elsewhere it would leave other gaps.

    Args:
        trace: A steady step, without `regions`.
        regions: Regions to checkpoint; regions with others inside keep nothing.

    Raises:
        KeyError: A region has no forward call that could be checkpointed.
    """
    return list(allocations_of(Replay(trace, costs, regions), steps))


def allocations_of(replay: Replay, steps: int = 2, *, is_labelled: bool = True) -> Iterator[AllocationEvent]:
    """Yield the allocations and frees of a program that runs steps which were replayed, as `allocations` returns them.

    Args:
        is_labelled: Whether events say which operator they belong to, which takes a while to find.
    """
    return _Program(replay, is_labelled).events(steps)


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
        """Find what the next step has of each storage that a step leaves, and where gradients that stay are made."""
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

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


def _written_over(dead: Sequence[Life], point: int, nbytes: int) -> Iterator[Life]:
    """Yield the storages that a kernel writes its outputs over (`kernels`), the largest first: some bytes in all."""
    for life in sorted(dead, key=lambda life: -life.nbytes):
        if nbytes >= life.nbytes > 0 and life.first < point:
            nbytes -= life.nbytes
            yield life


class _Program:
    """The events of a program: a step's storages in the order in which they are allocated and freed."""

    def __init__(self, replay: Replay, is_labelled: bool) -> None:
        self.replay = replay
        count = len(replay.points)
        phases = [replay.trace.ops[op].phase for op, _ in replay.points]
        self.labels = replay.labels if is_labelled else [""] * count
        self.first: dict[str, int] = {phase: phases.index(phase) for phase in dict.fromkeys(phases)}
        last = max((i for i, phase in enumerate(phases) if phase == "backward"), default=-1)
        self.makes_state = min(last + 1, count - 1)
        self.before: list[Life] = []
        self.state: list[Life] = []
        self.left: list[Life] = []
        self.born: list[list[Life]] = [[] for _ in range(count)]
        self.accumulated: list[list[Life]] = [[] for _ in range(count)]
        self.dead: list[list[Life]] = [[] for _ in range(count)]
        for life in replay.lives():
            if life.first >= 0:
                self.born[life.first].append(life)
                (self.dead[life.last] if life.last < count else self.left).append(life)
                continue
            (self.state if life.category == "optimizer state" else self.before).append(life)
            if life.last < count:
                self.dead[life.last].append(life)
        self._carry(count)
        self.ids: dict[int, int] = {}

    def _carry(self, count: int) -> None:
        """Find what the next step has of each storage that a step leaves, and where gradients that stay are made."""
        left: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for life in self.left:
            if life.name < len(self.replay.trace.storages):  # not made by a recomputation
                left[self._kind(life)].append(life.name)
        self.carried: dict[int, int] = {}  # the name in the next step, of the name in this
        for life in self.before:
            if life.last < count and left[self._kind(life)]:
                self.carried[left[self._kind(life)].pop(0)] = life.name
        for life in self.left:
            if life.name not in self.carried:
                self.dead[count - 1].append(life)
        writes = self._backward_writes()
        for life in self.before:
            if life.category == "gradients" and life.last >= count and life.name in writes:
                self.accumulated[writes[life.name]].append(life)
        made_later = {*self.carried.values(), *(life.name for lives in self.accumulated for life in lives)}
        self.before = [life for life in self.before if life.name not in made_later]

    def _kind(self, life: Life) -> tuple[object, ...]:
        return life.category, life.nbytes, self.replay.trace.storages[life.name].parameter

    def _backward_writes(self) -> dict[int, int]:
        """Return the point at which the backward pass first adds to a storage, by its name."""
        found: dict[int, int] = {}
        for index, op in enumerate(self.replay.trace.ops):
            if op.phase == "backward":
                for storage in op.mutates:
                    found.setdefault(storage, self.replay.position[index])
        return found

    def events(self, steps: int) -> Iterator[AllocationEvent]:
        workspaces = self.replay.workspaces().tolist()
        at_points = list(zip(self.born, workspaces, self.dead, self.accumulated, strict=True))
        for step in range(steps):
            yield from self._made(-1, self.before)
            resident = {} if step else self._resident_workspaces()
            for point, (born, workspace, dead, accumulated) in enumerate(at_points):
                if point == self.makes_state:
                    yield from self._made(point, self.state)
                if point in resident:
                    yield self._event(point, resident[point], True)
                for life in _written_over(dead, point, -workspace):
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
                if accumulated:
                    yield from self._made(point, accumulated)
            for name, following in self.carried.items():
                self.ids[following] = self.ids.pop(name)

    def _made(self, point: int, lives: list[Life]) -> Iterator[AllocationEvent]:
        for life in lives:
            if life.name not in self.ids:
                yield self._event(point, life, True)

    def _resident_workspaces(self) -> dict[int, Life]:
        """Return libraries' resident workspaces: half at the first forward, half at the first backward operator."""
        half = self.replay.costs.resident_workspace_bytes // 2
        points = [self.first[phase] for phase in ("forward", "backward") if half and phase in self.first]
        return {point: Life(_RESIDENT - i, half, WORKSPACE, point, point) for i, point in enumerate(points)}

    def _event(self, point: int, life: Life, alloc: bool) -> AllocationEvent:
        if alloc:
            number = self.ids[life.name] = self._unused(life.name)
        else:
            number = self.ids.pop(life.name)
        label = self.labels[point] if point >= 0 else life.category
        return AllocationEvent(point, number, life.nbytes, alloc, life.category, label)

    def _unused(self, name: int) -> int:
        """Return a number for a storage: another than its own where the last step's still has that."""
        following = self.carried.get(name)
        taken = following is not None and self.ids.get(following) == name
        return _SECOND - name if taken else name

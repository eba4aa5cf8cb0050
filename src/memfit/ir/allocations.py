"""The allocations and frees of a program that runs steps, in order."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.allocator.replay import AllocationEvent
from memfit.ir.operator_costs import CostTable
from memfit.ir.remat import Region
from memfit.ir.simulate import Life, Replay
from memfit.ir.timeline import WORKSPACE
from memfit.ir.trace import Trace

_SCRATCH = -1  # names of storages that are not in the trace
_RESIDENT = -2


def allocations(
    trace: Trace, costs: CostTable, regions: Sequence[Region] = (), steps: int = 2
) -> list[AllocationEvent]:
    """Return the allocations and frees of a program that runs steps, in order, for `allocator.replay`.

    Parameters, buffers and the batch come first; the optimizer makes its state in the first step.

    Args:
        trace: A steady step, without `regions`.
        regions: Regions to checkpoint; regions with others inside keep nothing.

    Raises:
        KeyError: A region has no forward call that could be checkpointed.
    """
    return _Program(Replay(trace, costs, regions)).events(steps)


class _Program:
    """The events of a program: a step's storages in the order in which they are allocated and freed."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        count = len(replay.points)
        phases = [replay.trace.ops[op].phase for op, _ in replay.points]
        self.labels = [replay.label(i) for i in range(count)]
        self.first: dict[str, int] = {phase: phases.index(phase) for phase in dict.fromkeys(phases)}
        last = max((i for i, phase in enumerate(phases) if phase == "backward"), default=-1)
        self.makes_state = min(last + 1, count - 1)
        self.before: list[Life] = []
        self.state: list[Life] = []
        self.born: list[list[Life]] = [[] for _ in range(count)]
        self.dead: list[list[Life]] = [[] for _ in range(count)]
        for life in replay.lives():
            if life.first >= 0:
                self.born[life.first].append(life)
                self.dead[min(life.last, count - 1)].append(life)
                continue
            (self.state if life.category == "optimizer state" else self.before).append(life)
            if life.last < count:
                self.dead[life.last].append(life)
        self.alive: set[int] = set()
        self.found: list[AllocationEvent] = []

    def events(self, steps: int) -> list[AllocationEvent]:
        for step in range(steps):
            self._make(-1, self.before)
            for point in range(len(self.labels)):
                if point == self.makes_state:
                    self._make(point, self.state)
                if step == 0:
                    self._keep_workspace(point)
                self._run(point)
        return self.found

    def _make(self, point: int, lives: list[Life]) -> None:
        for life in lives:
            if life.name not in self.alive:
                self._add(point, life, True)

    def _run(self, point: int) -> None:
        for life in self.born[point]:
            self._add(point, life, True)
        workspace = self.replay.workspace_bytes(point)
        if workspace:
            scratch = Life(_SCRATCH, workspace, WORKSPACE, point, point)
            self._add(point, scratch, True)
            self._add(point, scratch, False)
        for life in self.dead[point]:
            if life.name in self.alive:
                self._add(point, life, False)

    def _keep_workspace(self, point: int) -> None:
        """Allocate libraries' resident workspaces: half at the first forward, half at the first backward operator."""
        half = self.replay.costs.resident_workspace_bytes // 2
        for thread, phase in enumerate(("forward", "backward")):
            if half and point == self.first.get(phase):
                self._add(point, Life(_RESIDENT - thread, half, WORKSPACE, point, point), True)

    def _add(self, point: int, life: Life, alloc: bool) -> None:
        (self.alive.add if alloc else self.alive.discard)(life.name)
        label = self.labels[point] if point >= 0 else life.category
        self.found.append(AllocationEvent(point, life.name, life.nbytes, alloc, life.category, label))

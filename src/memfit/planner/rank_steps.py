"""The step of one rank for any number of samples and ranks, from few captures, with a menu of what it recomputes.

For `planner.fleet_search`. The menu goes from nothing to the lowest peak, and is solved once for all cards and ranks.
When storages are born and die is replayed once for each program: samples, ranks and cards change only bytes and costs
(`Replay.under`). What the simulated allocator holds is found once for storages and workspaces of the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import thread_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.allocator.caching_allocator import replay as replay_allocations
from memfit.ir.allocations import allocations_of
from memfit.ir.device import Device
from memfit.ir.interpolation import between, is_one_program, of_samples
from memfit.ir.operator_costs import CostTable
from memfit.ir.plan import Levers, Precision
from memfit.ir.remat import Region, Regions, enclosing
from memfit.ir.simulate import Replay
from memfit.ir.trace import Trace
from memfit.planner.captures import Captures
from memfit.planner.prediction import costs_of
from memfit.sharding.one_rank import shard, with_share_of_update
from memfit.solver.candidates import options
from memfit.solver.highs import Ints
from memfit.solver.milp import COARSE, Solver
from memfit.solver.problem import Problem, build
from memfit.workload import Workload, samples_of

_BUDGETS = 16  # that the menu is solved for, where there is time
_MENU_SECONDS = 8.0  # for all of them, and for the lowest peak before
_MENU = 32  # points of the menu, at most
_LOW = 2  # samples of the smaller size captured: one sample alone often is another program

RegionSet = tuple[Region, ...]


class ScaledTrace:
    """The step of one rank in one precision, for any number of samples, as some cards run it."""

    def __init__(self, workload: Workload, device: Device, precision: Precision, most: int) -> None:
        self.workload, self.device, self.precision, self.most = workload, device, precision, most
        self._captures = Captures(workload, device)
        self._of_one: dict[int, Trace] = {}
        self._of_two: dict[int, Trace] = {}

    def trace(self, size: int, samples: int) -> Trace:
        """Return the step of a rank with some samples, in microbatches of a size."""
        if size >= samples:
            return self._sized(self._of_one, samples, self.most, lambda size: self._part(size)(self._levers(size)))
        trace = self._sized(
            self._of_two,
            size,
            min(self.most, samples_of(self.workload)) // 2,
            lambda size: self._captures(self._levers(size)),
        )
        if trace.microbatches == 2:
            return of_samples(trace, samples)
        return self._part(samples)(self._levers(size))  # microbatches differ: all of them are captured

    def _sized(self, known: dict[int, Trace], size: int, most: int, captured: Callable[[int], Trace]) -> Trace:
        """Return the step of a size: a captured one, or from two that were."""
        if size not in known:
            is_end = size <= _LOW or size == most or most <= _LOW + 1
            found = None
            if not is_end:
                low, high = (self._sized(known, end, most, captured) for end in (_LOW, most))
                found = between(low, high, size)
            known[size] = found or captured(size)
        return known[size]

    def _levers(self, size: int) -> Levers:
        return Levers(precision=self.precision, microbatch_size=size)

    def _part(self, samples: int) -> Captures:
        if samples == samples_of(self.workload):
            return self._captures
        from memfit.ranks.mesh import with_samples  # distributed packages take a second to import

        return Captures(with_samples(self.workload, samples), self.device)


class _Step(NamedTuple):
    """The step of one rank on paper.

    Attributes:
        holds: Stands for the bytes of its storages: other samples and ranks may have the same.
    """

    trace: Trace
    pattern: _Pattern
    holds: bytes


class _Pattern:
    """The replays of one program, of which only bytes and costs differ by samples and ranks."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._replays: dict[int, Replay] = {}

    def replay(self, trace: Trace, point: int, regions: RegionSet, costs: CostTable) -> Replay:
        """Return the replay of one of its steps with the regions of a point of the menu recomputed."""
        if point not in self._replays:
            self._replays[point] = Replay(self.trace, costs, regions)
        return self._replays[point].under(costs, trace)


class RankModel:
    """The steps of one rank on paper, with some modules recomputed: replayed once for all cards of a group.

    Args:
        menus: By precision, what is recomputed, from nothing to the lowest peak.
    """

    def __init__(self, programs: dict[Precision, ScaledTrace], menus: dict[Precision, list[RegionSet]]) -> None:
        self.programs, self.menus = programs, menus
        self._steps: dict[tuple[object, ...], _Step] = {}
        self._replays: dict[tuple[object, ...], Replay] = {}
        self._costs: dict[tuple[object, ...], CostTable] = {}
        self._workspaces: dict[tuple[object, ...], bytes] = {}
        self._patterns: dict[tuple[object, ...], list[_Pattern]] = defaultdict(list)
        self._peaks: dict[tuple[object, ...], int] = {}
        self._held: dict[tuple[object, ...], tuple[int, int]] = {}
        self._exceeded: dict[tuple[object, ...], float] = {}

    def forget(self) -> None:
        """Forget the steps of one number of ranks, which no other has."""
        self._steps.clear()
        self._replays.clear()
        self._costs.clear()
        self._workspaces.clear()

    def sharded(self, levers: Levers, samples: int) -> Trace:
        """Return the step of one rank, with its share of the update."""
        return self._step(levers, samples).trace

    def costs(self, levers: Levers, samples: int, device: Device) -> CostTable:
        """Return the costs of a step on a card."""
        key = (*_key(levers, samples), device.name)
        if key not in self._costs:
            self._costs[key] = costs_of([self.sharded(levers, samples)], device)
        return self._costs[key]

    def replay(self, levers: Levers, samples: int, point: int, device: Device) -> Replay:
        """Return the replay of a step on a card, with the modules of a point of the menu recomputed."""
        costs = self.costs(levers, samples, device)
        key = (*_key(levers, samples), point)
        if key not in self._replays:
            step, regions = self._step(levers, samples), self.menus[levers.precision][point]
            self._replays[key] = step.pattern.replay(step.trace, point, regions, costs)
        return self._replays[key].under(costs)

    def peak_bytes(self, levers: Levers, samples: int, point: int, device: Device) -> int:
        """Return the most live bytes of a step on a card, with the modules of a point of the menu recomputed."""
        key = self._holds(levers, samples, point, device)
        if key not in self._peaks:
            self._peaks[key] = self.replay(levers, samples, point, device).peak_bytes()
        return self._peaks[key]

    def held_bytes(
        self, levers: Levers, samples: int, point: int, device: Device, most: float = math.inf
    ) -> tuple[int, int] | None:
        """Return the most that the simulated allocator has allocated and reserved for a step on a card.

        Args:
            most: Reserved bytes of which there is no need to know how far they are exceeded: None then.
        """
        settings = device.allocator
        limited = settings.memory_fraction < 1 or settings.expandable_segments  # else the card's memory changes nothing
        key = (*self._holds(levers, samples, point, device), settings, device.memory_bytes if limited else 0)
        if key not in self._held:
            if most <= self._exceeded.get(key, -1):
                return None
            events = allocations_of(self.replay(levers, samples, point, device), is_labelled=False)
            report = replay_allocations(events, settings, total_bytes=device.memory_bytes, until_reserved_bytes=most)
            if report.peak_reserved_bytes > most:
                self._exceeded[key] = most
                return None
            self._held[key] = report.peak_allocated_bytes, report.peak_reserved_bytes
        return self._held[key] if self._held[key][1] <= most else None

    def _holds(self, levers: Levers, samples: int, point: int, device: Device) -> tuple[object, ...]:
        """Return what the bytes of a step depend on: its program, the bytes of its storages, and its workspaces."""
        step, key = self._step(levers, samples), (*_key(levers, samples), device.name)
        if key not in self._workspaces:
            costs = self.costs(levers, samples, device)
            sizes = [costs.of(text).workspace_bytes for text in step.trace.signatures]
            # By operator, since signatures are numbered otherwise for another number of samples.
            of_ops = np.array(sizes, np.int64)[step.trace.op_signatures]
            self._workspaces[key] = _digest(of_ops, costs.resident_workspace_bytes)
        return id(step.pattern), point, step.holds, self._workspaces[key]

    def _step(self, levers: Levers, samples: int) -> _Step:
        key = _key(levers, samples)
        if key not in self._steps:
            trace = self.programs[levers.precision].trace(levers.microbatch_size, samples)
            if levers.sharding is not None:
                trace = with_share_of_update(shard(trace, levers.sharding), levers.sharding)
            self._steps[key] = _Step(trace, self._pattern(trace), _digest(trace.storage_bytes))
        return self._steps[key]

    def _pattern(self, trace: Trace) -> _Pattern:
        """Return what is known of steps that run the same program: it outlives numbers of ranks."""
        alike = self._patterns[trace.precision, len(trace.ops), len(trace.storages)]
        for pattern in alike:
            if is_one_program(pattern.trace, trace):
                return pattern
        alike.append(_Pattern(trace))
        return alike[-1]


def _key(levers: Levers, samples: int) -> tuple[object, ...]:
    """Return what the step of one rank depends on, whatever is recomputed."""
    return levers.precision, levers.microbatch_size, samples, levers.sharding


def _digest(sizes: npt.NDArray[np.int64], more: int = 0) -> bytes:
    """Return a digest of some sizes in bytes: as a key it is small, and the sizes are tens of kilobytes."""
    return hashlib.blake2b(sizes.tobytes() + more.to_bytes(8, "little"), digest_size=16).digest()


def checkpoint_menu(trace: Trace, costs: CostTable, units: Sequence[str]) -> list[RegionSet]:
    """Return what may be recomputed, from nothing to the lowest peak, each point slower and lower than the last.

    A few budgets are solved. Between them lie parts of each solution: modules of a model are much alike, so that half
    of them save about half. Only modules alone are taken, none of them around what `fully_shard` gathers by itself.
    """
    regions = Regions(trace)
    choices = [
        option
        for option in options(regions, costs)
        if all(len(region.modules) == 1 and not _surrounds(region.modules[0], units) for region in option.regions)
    ]
    problem = build(regions, costs, choices)
    solver, nothing = Solver(problem), np.zeros(len(choices), np.int64)
    deadline = thread_time() + _MENU_SECONDS
    lowest = solver.leanest(_MENU_SECONDS / 4)
    solutions = [lowest.x]
    budgets = np.linspace(problem.peak_bytes(nothing), lowest.peak_bytes, _BUDGETS + 1)[1:]
    for budget_bytes in (*budgets[3::4], *budgets[1::4], *budgets[::2]):  # ever closer ones
        if (left := deadline - thread_time()) <= 0:
            break
        choice = solver.fastest(int(budget_bytes), COARSE, min(left, _MENU_SECONDS / 4))
        solutions += [choice.x] if choice is not None else []
    points = [nothing, *(part for x in solutions for part in _parts_of(x))]
    return [problem.regions(x) for x in _thinned(_undominated(points, problem), problem)]


def _parts_of(x: Ints) -> list[Ints]:
    """Return a choice with only its first options, by how many, up to all of them."""
    chosen = np.nonzero(x)[0]
    found = []
    for count in range(1, len(chosen) + 1):
        part = np.zeros_like(x)
        part[chosen[:count]] = 1
        found.append(part)
    return found


def _undominated(points: Sequence[Ints], problem: Problem) -> list[Ints]:
    """Return the choices than which none is as fast and as low, the fastest first."""
    found: list[Ints] = []
    lowest = math.inf
    for x in sorted(points, key=lambda x: (problem.seconds(x), problem.peak_bytes(x))):
        if problem.peak_bytes(x) < lowest:
            found.append(x)
            lowest = problem.peak_bytes(x)
    return found


def _thinned(points: Sequence[Ints], problem: Problem) -> list[Ints]:
    """Return at most so many choices, about evenly by their peaks, the first and the last included."""
    peaks = [problem.peak_bytes(x) for x in points]
    wanted = np.linspace(peaks[0], peaks[-1], _MENU)
    nearest = {min(range(len(peaks)), key=lambda i: abs(peaks[i] - peak)) for peak in wanted}
    return [points[i] for i in sorted({0, *nearest, len(points) - 1})]


def _surrounds(fqn: str, units: Sequence[str]) -> bool:
    return any(fqn != unit and fqn in enclosing(unit) for unit in units)


def menu_of(points: Sequence[RegionSet], trace: Trace) -> list[RegionSet]:
    """Return the points of a menu whose modules another program has too."""
    regions = Regions(trace)
    return [point for point in points if all(region.modules[0] in regions.calls for region in point)]

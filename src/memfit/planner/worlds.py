"""The fastest plans of a workload for many kinds of card and numbers of ranks, from few captures.

What makes it quick:

1. The program of a rank depends on its own samples only, and hardly on their number: two sizes are captured, and others
   lie between them (`ir.interpolation`). Cards with the same kernels share the captures.
2. Which modules are worth recomputing is solved once, as a menu from none of them to the lowest peak. Which point of
   the menu a card needs is found by halving.
3. Sharding is done on paper. When storages are born and die is replayed once for each program: samples, ranks and cards
   change only bytes and costs (`Replay.under`).
4. What the simulated allocator holds is found once for storages and workspaces of the same bytes, and only until there
   is no room.
5. A size of microbatch whose step alone is slower than a plan that fits is not looked at, nor are numbers of ranks
   that fewer do as well as.

What fits is held against the budget as `memfit.plan` holds it: by what the simulated allocator reserves, with its
error bar.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.allocator.replay import replay as replay_allocations
from memfit.errors import UsageError
from memfit.fake_gpu.kernel_registration import family, runs_alike
from memfit.hardware.advice import precisions as precisions_of
from memfit.ir.allocations import allocations_of
from memfit.ir.device import Device
from memfit.ir.fleet import Misfit
from memfit.ir.interpolation import between, is_one_program, of_samples
from memfit.ir.operator_costs import CostTable
from memfit.ir.plan import Levers, LeverUse, Numerics, Precision, allows, freest
from memfit.ir.remat import Region, Regions, enclosing
from memfit.ir.sharding import Mode
from memfit.ir.simulate import Replay
from memfit.ir.trace import Trace
from memfit.levers import registry
from memfit.planner.batch_coupling import coupling
from memfit.planner.captures import Captures
from memfit.planner.prediction import Progress, check_precision, costs_of
from memfit.planner.search import is_faster
from memfit.sharding.groups import repeated_blocks
from memfit.sharding.one_rank import shard, with_share_of_update
from memfit.sharding.proposals import proposals
from memfit.solver.candidates import options
from memfit.solver.milp import COARSE, Solver
from memfit.solver.problem import Problem, build
from memfit.units import Budget
from memfit.workload import Workload, samples_of

_LOW = 2  # samples of the smaller size captured: one sample alone often is another program
_BUDGETS = 16  # that the menu is solved for, where there is time
_MENU_SECONDS = 8.0  # for all of them, and for the lowest peak before
_MENU = 32  # points of the menu, at most

Regionals = tuple[Region, ...]
Choices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """The arguments of `memfit.fleet`, made definite.

    Attributes:
        precisions: Precisions to search; None for the one that suits each card and `numerics`.
        each: Whether to solve for numbers of ranks that can't be faster than fewer.
    """

    workload: Workload
    devices: Sequence[Device]
    budget: Budget
    numerics: Numerics
    precisions: Sequence[Precision] | None
    world_sizes: Sequence[int]
    modes: Sequence[Mode]
    each: bool
    progress: Progress


class Found(NamedTuple):
    """The fastest plan of some cards.

    Attributes:
        held_bytes: Upper end of what the allocator reserves.
    """

    device: str
    ranks: int
    levers: Levers
    uses: tuple[LeverUse, ...]
    numerics: Numerics
    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    step_seconds: float


class Worlds(NamedTuple):
    """What was found, for which cards nothing fits, and what was assumed."""

    found: list[Found]
    misfits: list[Misfit]
    notes: list[str]
    step_error: float


def search(asked: Asked) -> Worlds:
    """Return the fastest plan found for each card and number of ranks.

    Raises:
        CaptureError: The step can't be captured.
        UsageError: A precision is not one of a card's.
    """
    return _Search(asked).worlds()


def precisions_for(device: Device, numerics: Numerics, asked: Sequence[Precision] | None) -> tuple[Precision, ...]:
    """Return the precisions to search on a card: the mixed one that it is made for, where the numerics allow it."""
    if asked is not None:
        return tuple(asked)
    return (precisions_of(device)[-1],) if allows(numerics, "reduced") else ("32-true",)


def in_two(devices: Sequence[Device], numerics: Numerics, asked: Sequence[Precision] | None) -> list[list[Device]]:
    """Return cards in at most two parts to search at once, those that share captures in the same one."""
    sharing: dict[tuple[object, ...], list[Device]] = defaultdict(list)
    for device in devices:
        sharing[precisions_for(device, numerics, asked), family(device)].append(device)
    parts: tuple[list[Device], list[Device]] = [], []
    for group in sorted(sharing.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    return [part for part in parts if part]


def joined(searches: Sequence[Worlds]) -> Worlds:
    """Return the results of searches for different cards as those of one."""
    return Worlds(
        found=[row for search in searches for row in search.found],
        misfits=[misfit for search in searches for misfit in search.misfits],
        notes=list(dict.fromkeys(note for search in searches for note in search.notes)),
        step_error=max(search.step_error for search in searches),
    )


class _Program:
    """The step of one rank in one precision, for any number of samples, as some cards run it."""

    def __init__(self, workload: Workload, device: Device, precision: Precision, most: int) -> None:
        self.workload, self.device, self.precision, self.most = workload, device, precision, most
        self._captures = Captures(workload, device)
        self._of_one: dict[int, Trace] = {}
        self._of_two: dict[int, Trace] = {}

    def trace(self, size: int, samples: int) -> Trace:
        """Return the step of a rank with some samples, in microbatches of a size."""
        if size >= samples:
            return self._sized(self._of_one, samples, self.most, self._one)
        trace = self._sized(self._of_two, size, min(self.most, samples_of(self.workload)) // 2, self._two)
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

    def _one(self, size: int) -> Trace:
        return self._part(size)(self._levers(size))

    def _two(self, size: int) -> Trace:
        return self._captures(self._levers(size))

    def _levers(self, size: int) -> Levers:
        return Levers(precision=self.precision, microbatch_size=size)

    def _part(self, samples: int) -> Captures:
        if samples == samples_of(self.workload):
            return self._captures
        from memfit.ranks.mesh import with_samples  # distributed packages take a second to import

        return Captures(with_samples(self.workload, samples), self.device)


class _Point(NamedTuple):
    """A point that was looked at: what the step would be, and what it takes."""

    levers: Levers
    peak_bytes: int
    held_bytes: int
    step_seconds: float


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

    def replay(self, trace: Trace, point: int, regions: Regionals, costs: CostTable) -> Replay:
        """Return the replay of one of its steps with the regions of a point of the menu recomputed."""
        if point not in self._replays:
            self._replays[point] = Replay(self.trace, costs, regions)
        return self._replays[point].under(costs, trace)


class _Paper:
    """The steps of one rank on paper, with some modules recomputed: replayed once for all cards of a group.

    Args:
        menus: By precision, what is recomputed, from nothing to the lowest peak.
    """

    def __init__(self, programs: dict[Precision, _Program], menus: dict[Precision, list[Regionals]]) -> None:
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
    """Return what stands for some sizes in bytes: tens of kilobytes would stay for each step otherwise."""
    return hashlib.blake2b(sizes.tobytes() + more.to_bytes(8, "little"), digest_size=16).digest()


class _Search:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.samples = samples_of(asked.workload)
        self.found: list[Found] = []
        self.misfits: list[Misfit] = []
        self.notes: list[str] = []
        self.step_error = 0.0
        self.done = 0

    def worlds(self) -> Worlds:
        asked, waiting = self.asked, list(self.asked.devices)
        for device in waiting:
            for precision in asked.precisions or ():
                check_precision(precision, "precisions", device, asked.workload)
        menus: dict[Precision, list[Regionals]] = {}
        while waiting:
            group, waiting = self._group(waiting, menus)
            group.run()
        return Worlds(self.found, self.misfits, list(dict.fromkeys(self.notes)), self.step_error)

    def _group(self, waiting: list[Device], menus: dict[Precision, list[Regionals]]) -> tuple[_Group, list[Device]]:
        """Return the first card that waits with all that run its program, and the others."""
        asked, first = self.asked, waiting[0]
        searched = precisions_for(first, asked.numerics, asked.precisions)
        sizes = self.world_sizes
        most = -(-self.samples // sizes[0])
        asked.progress("capture", len(asked.devices) - len(waiting), len(asked.devices))
        programs = {precision: _Program(asked.workload, first, precision, most) for precision in searched}
        traces = {precision: program.trace(most, most) for precision, program in programs.items()}
        alike = [
            device
            for device in waiting
            if precisions_for(device, asked.numerics, asked.precisions) == searched and runs_alike(first, device)
        ]
        plain = traces[searched[0]]
        self.notes += [note for note in plain.notes if not note.startswith("attention on ")]
        units = repeated_blocks(plain)
        for precision, trace in traces.items():
            if precision not in menus:
                asked.progress("solve", len(menus), len(menus) + 1)
                menus[precision] = menu(trace, costs_of([trace], first), units)
        fitting = {precision: _valid(menus[precision], trace) for precision, trace in traces.items()}
        group = _Group(self, alike, _Paper(programs, fitting), units, self._couples(plain))
        return group, [device for device in waiting if device not in alike]

    @functools.cached_property
    def world_sizes(self) -> list[int]:
        """Return the numbers of ranks that have a sample each, from the fewest."""
        sizes = sorted(set(self.asked.world_sizes))
        useful = [size for size in sizes if size <= self.samples]
        if len(useful) < len(sizes):
            self.notes.append(f"more than {self.samples} ranks would have no sample each: they are left out")
        if not useful:
            raise UsageError(
                f"world_sizes= begins at {sizes[0]}, and the batch has {self.samples} samples, so that ranks would have"
                " none: give fewer ranks, or a larger Workload.batch"
            )
        return useful

    def _couples(self, trace: Trace) -> bool:
        """Tell whether samples are coupled; note what that leaves out where the numerics don't allow another training.

        Raises:
            UsageError: It leaves out every number of ranks.
        """
        found = coupling(trace, self.asked.workload)
        if found is None or self.asked.numerics == "changed":
            return found is not None
        if self.world_sizes[0] > 1:
            raise UsageError(f"world_sizes= has no single rank, and no others are allowed: {found}")
        self.notes.append(f"one rank and one microbatch only: {found}")
        return True

    def advance(self) -> None:
        self.done += 1
        self.asked.progress("search", self.done, len(self.asked.devices) * len(self.world_sizes))


class _Group:
    """The search for cards that run one program."""

    def __init__(
        self, search: _Search, devices: list[Device], paper: _Paper, units: tuple[str, ...], couples: bool
    ) -> None:
        self.search, self.devices, self.paper, self.units = search, devices, paper, units
        self.asked, self.couples = search.asked, couples
        self.is_whole = couples and search.asked.numerics != "changed"  # the batch is cut by nothing
        self._alone: dict[tuple[object, ...], tuple[float, float]] = {}

    def run(self) -> None:
        fastest = dict.fromkeys((device.name for device in self.devices), math.inf)
        free: dict[tuple[str, int], bool] = {}  # whether memory limited no plan of a rank with so many samples
        least: dict[str, Misfit] = {}
        for ranks in self.search.world_sizes:
            if self.is_whole and ranks > 1:
                break
            for device in self.devices:
                self.search.advance()
                key = device.name, self.samples(ranks)
                if not self.asked.each and self._is_beaten(ranks, device, fastest[device.name], free.get(key, False)):
                    continue
                budget_bytes = self.asked.budget.nbytes(device_bytes=device.usable_bytes)
                found = _OneCard(self, device, ranks, budget_bytes).fastest()
                if isinstance(found, Misfit):
                    kept = least.get(device.name, found)
                    least[device.name] = min(kept, found, key=lambda each: each.held_bytes)
                    continue
                fastest[device.name] = min(fastest[device.name], found.step_seconds)
                free[key] = not found.levers.regions and found.levers.microbatch_size == self.samples(ranks)
                self.search.found.append(found)
            self.paper.forget()
        self.search.misfits += [
            least[name] for name, seconds in fastest.items() if seconds == math.inf and name in least
        ]

    def _is_beaten(self, ranks: int, device: Device, fastest: float, is_free: bool) -> bool:
        """Tell whether fewer cards do as well: no step can be faster, or as many samples a rank have room.

        More cards would then share the update only, and send more. Whole nodes are looked at all the same, since they
        may keep copies of what is sharded.
        """
        if is_free and ranks % device.cards_per_node:
            return True
        return not is_faster(min(self.bound_seconds(levers, ranks, device) for levers in self.sizes(ranks)), fastest)

    def samples(self, ranks: int) -> int:
        """Return the samples of the rank with the most."""
        return -(-self.search.samples // ranks)

    def sizes(self, ranks: int) -> list[Levers]:
        """Return the levers of each precision and microbatch size, the whole of a rank's samples first."""
        samples = self.samples(ranks)
        sizes = [samples]
        while sizes[-1] > 1 and not self.is_whole and allows(self.asked.numerics, "reordered"):
            sizes.append(-(-sizes[-1] // 2))
        return [Levers(precision=p, microbatch_size=size) for p in self.paper.programs for size in sizes]

    def shardings(self, levers: Levers, ranks: int, device: Device) -> list[Levers]:
        """Return levers with each sharding among some ranks, the simplest first; alone for one rank."""
        if ranks == 1:
            return [levers]
        reduces = ("last", "each") if levers.microbatch_size < self.samples(ranks) else ("each",)
        return [
            replace(levers, sharding=replace(sharding, reduces=when))
            for sharding in proposals(ranks, self.asked.modes, self.units, device.cards_per_node)
            for when in reduces
        ]

    def bound_seconds(self, levers: Levers, ranks: int, device: Device) -> float:
        """Return the least time of a step of one rank: all is computed once, nothing waits, and updates take no time.

        A sample alone is taken to need half of the time of two: its step need not be captured to leave it out.
        """
        samples = self.samples(ranks)
        if levers.microbatch_size == 1 < samples:
            return self.bound_seconds(replace(levers, microbatch_size=2), ranks, device)
        count = -(-samples // levers.microbatch_size)
        key = (device.name, levers.precision, levers.microbatch_size, samples if count == 1 else 0)
        if key not in self._alone:
            self._alone[key] = self._parts(levers, samples, device)
        once, again = self._alone[key]
        return once + (count - 1) * again

    def _parts(self, levers: Levers, samples: int, device: Device) -> tuple[float, float]:
        """Return the seconds of the first microbatch, and of each later one; updates are left out."""
        trace = self.paper.programs[levers.precision].trace(levers.microbatch_size, samples)
        costs = costs_of([trace], device)
        seconds = [costs.seconds_of(text) for text in trace.signatures]
        parts = [0.0, 0.0]
        for op in trace.ops:
            if op.phase != "optimizer":
                parts[min(op.microbatch, 1)] += seconds[op.signature]
        return parts[0], parts[1]


class _OneCard:
    """The search for one kind of card and one number of ranks."""

    def __init__(self, group: _Group, device: Device, ranks: int, budget_bytes: int) -> None:
        self.group, self.device, self.ranks, self.budget_bytes = group, device, ranks, budget_bytes
        self.paper, self.samples = group.paper, group.samples(ranks)
        self._lowest: dict[Levers, float] = {}
        self._plain_fits: dict[Levers, bool] = {}
        self._tried: list[tuple[Levers, int]] = []  # points that have no room by the simulated allocator

    def fastest(self) -> Found | Misfit:
        """Return the fastest plan that fits; what comes nearest where none does."""
        best: _Point | None = None
        bounded = [(self.group.bound_seconds(each, self.ranks, self.device), each) for each in self._sizes()]
        for bound, levers in sorted(bounded, key=lambda item: item[0]):
            if best is not None and not is_faster(bound, best.step_seconds):
                break  # as is every later one
            if not self._has_room(levers):
                continue
            for shared in self.group.shardings(levers, self.ranks, self.device):
                if not self._gathers_for_nothing(shared):
                    best = self._faster(shared, best)
        if best is None:
            held = [self._held(*tried, math.inf) for tried in self._tried]
            held_bytes = int(min([*(each[1] for each in held if each is not None), *self._lowest.values()]))
            return Misfit(
                device=self.device.name, ranks=self.ranks, held_bytes=held_bytes, budget_bytes=self.budget_bytes
            )
        search = self.group.search
        uses = registry.uses(best.levers, search.samples, self.group.couples)
        numbers = (self.budget_bytes, best.peak_bytes, best.held_bytes, best.step_seconds)
        return Found(self.device.name, self.ranks, best.levers, uses, freest(uses), *numbers)

    def _sizes(self) -> list[Levers]:
        return self.group.sizes(self.ranks)

    def _has_room(self, levers: Levers) -> bool:
        """Tell whether a size fits by live bytes where the most is sharded and recomputed: others hold more."""
        shardings = self.group.shardings(levers, self.ranks, self.device)
        if self._live_upper(shardings[0], 0) <= self.budget_bytes:
            return True
        if levers not in self._lowest:
            leanest = max(shardings, key=_share)
            self._lowest[levers] = self._live_upper(leanest, len(self.paper.menus[levers.precision]) - 1)
        return self._lowest[levers] <= self.budget_bytes

    def _gathers_for_nothing(self, levers: Levers) -> bool:
        """Tell whether parameters would be gathered twice though keeping them gathered has room: that is as fast."""
        sharding = levers.sharding
        if sharding is None or sharding.mode != "zero3" or "zero2" not in self.group.asked.modes:
            return False
        kept = replace(levers, sharding=replace(sharding, mode="zero2", kept=()))
        return self._plain_fits.get(kept, False)

    def _live_upper(self, levers: Levers, point: int) -> float:
        return self.paper.peak_bytes(levers, self.samples, point, self.device) * self._excess(levers)

    def _excess(self, levers: Levers) -> float:
        costs, trace = self.paper.costs(levers, self.samples, self.device), self.paper.sharded(levers, self.samples)
        self.group.search.step_error = max(self.group.search.step_error, costs.step_error)
        return (1 + costs.peak_error) * (1 + trace.slack)

    def _faster(self, levers: Levers, best: _Point | None) -> _Point | None:
        """Return the fastest point of some levers that fits where it beats the best so far, which stays otherwise."""
        than = math.inf if best is None else best.step_seconds
        plain = self.paper.replay(levers, self.samples, 0, self.device)
        if best is not None and not is_faster(plain.step_seconds(), than):
            self._plain_fits[levers] = True  # for what sends more: that is no faster either
            return best
        menu, first = self.paper.menus[levers.precision], self._first_with_room(levers)
        for point in range(first, len(menu)):
            seconds = self.paper.replay(levers, self.samples, point, self.device).step_seconds()
            if not is_faster(seconds, than):
                break
            held = self._held(levers, point, self.budget_bytes)
            if held is not None:
                self._plain_fits[levers] = point == 0
                return _Point(replace(levers, regions=menu[point]), *held, seconds)
            self._tried.append((levers, point))
        return best

    def _first_with_room(self, levers: Levers) -> int:
        """Return the first point of the menu that fits by live bytes, by halving: peaks fall along it."""
        count = len(self.paper.menus[levers.precision])
        if self._live_upper(levers, 0) <= self.budget_bytes:
            return 0
        if self._live_upper(levers, count - 1) > self.budget_bytes:
            return count
        low, high = 0, count - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._live_upper(levers, middle) <= self.budget_bytes else (middle, high)
        return high

    def _held(self, levers: Levers, point: int, most: float) -> tuple[int, int] | None:
        """Return the peak allocated, and what is held against the budget, as `predict` has them; None for more."""
        excess = self._excess(levers)
        if self.device.kind == "cpu":
            allocated = reserved = self.paper.peak_bytes(levers, self.samples, point, self.device)
        else:
            found = self.paper.held_bytes(levers, self.samples, point, self.device, (most + 1) / excess)
            if found is None:
                return None
            allocated, reserved = found
        held_bytes = int(reserved * excess)
        return (allocated, held_bytes) if held_bytes <= most else None


def _share(levers: Levers) -> tuple[int, int, int, bool]:
    """Return how much of the state is cut: the most sharded is the largest."""
    sharding = levers.sharding
    if sharding is None:
        return 0, 0, 0, False
    return (
        ("ddp", "zero1", "zero2", "zero3").index(sharding.mode),
        sharding.shards,
        -len(sharding.kept),
        sharding.reduces == "each",
    )


def menu(trace: Trace, costs: CostTable, units: Sequence[str]) -> list[Regionals]:
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


def _parts_of(x: Choices) -> list[Choices]:
    """Return a choice with only its first options, by how many, up to all of them."""
    chosen = np.nonzero(x)[0]
    found = []
    for count in range(1, len(chosen) + 1):
        part = np.zeros_like(x)
        part[chosen[:count]] = 1
        found.append(part)
    return found


def _undominated(points: Sequence[Choices], problem: Problem) -> list[Choices]:
    """Return the choices than which none is as fast and as low, the fastest first."""
    found: list[Choices] = []
    lowest = math.inf
    for x in sorted(points, key=lambda x: (problem.seconds(x), problem.peak_bytes(x))):
        if problem.peak_bytes(x) < lowest:
            found.append(x)
            lowest = problem.peak_bytes(x)
    return found


def _thinned(points: Sequence[Choices], problem: Problem) -> list[Choices]:
    """Return at most so many choices, about evenly by their peaks, the first and the last included."""
    peaks = [problem.peak_bytes(x) for x in points]
    wanted = np.linspace(peaks[0], peaks[-1], _MENU)
    nearest = {min(range(len(peaks)), key=lambda i: abs(peaks[i] - peak)) for peak in wanted}
    return [points[i] for i in sorted({0, *nearest, len(points) - 1})]


def _surrounds(fqn: str, units: Sequence[str]) -> bool:
    return any(fqn != unit and fqn in enclosing(unit) for unit in units)


def _valid(points: Sequence[Regionals], trace: Trace) -> list[Regionals]:
    """Return the points of a menu that another program has too."""
    regions = Regions(trace)
    return [point for point in points if all(region.modules[0] in regions.calls for region in point)]

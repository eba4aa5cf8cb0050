"""The fastest plans of a workload for many kinds of card and numbers of ranks, from few captures.

What makes it quick:

1. The program of a rank depends on its own samples only, and hardly on their number: two sizes are captured, and others
   lie between them (`ir.trace`). Cards with the same kernels share the captures.
2. Which modules are worth recomputing is solved once, as a menu from none of them to the lowest peak. Which point of
   the menu a card needs is found by halving.
3. Sharding is done on paper. When storages are born and die is replayed once for each program: samples, ranks and cards
   change only bytes and costs (`Replay.under`).
4. What the simulated allocator holds is found once for storages and workspaces of the same bytes, and only until there
   is no room.
5. A size of microbatch whose step alone is slower than a plan that fits is not looked at, nor are numbers of ranks
   that fewer do as well as.
6. Cards that share no captures are searched at once, in a process each (`FleetRequest.in_two`).

What fits is held against the budget as `memfit.plan` holds it: by what the simulated allocator reserves, with its
error bar.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.foundations import Budget, Progress
from memfit.hardware import family, runs_alike
from memfit.hardware import precisions as precisions_of
from memfit.ir import (
    CardPrice,
    CostTable,
    Device,
    FleetRow,
    Levers,
    Misfit,
    Mode,
    Numerics,
    Precision,
    Region,
    Regions,
    Replay,
    Trace,
    allows,
    between,
    enclosing,
    freest,
)
from memfit.ir import replay as replay_allocations
from memfit.levers import LeversOn, lever_uses
from memfit.planner.batch_coupling import coupling
from memfit.planner.candidate_search import is_faster
from memfit.planner.captures import Captures
from memfit.planner.prediction import check_precision, costs_of
from memfit.ranks import proposals, repeated_blocks, shard, with_share_of_update
from memfit.solver import COARSE, Ints, Solver, build, options
from memfit.workload import Workload, samples_of

_BUDGETS = 16  # that the menu is solved for, where there is time
_MENU_SECONDS = 8.0  # for all of them, and for the lowest peak before
_MENU = 32  # points of the menu, at most
_LOW = 2  # samples of the smaller size captured: one sample alone often is another program

RegionSet = tuple[Region, ...]


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """The options of `memfit.fleet`, made definite and checked."""

    devices: Sequence[Device]
    budget: Budget
    steps: int
    world_sizes: Sequence[int]
    modes: Sequence[Mode]
    numerics: Numerics
    precisions: Sequence[Precision] | None  # None for the one that suits each card and the numerics
    prices: Mapping[str, CardPrice]  # by card
    each: bool  # also numbers of ranks that can't be faster than fewer

    def precisions_for(self, device: Device) -> tuple[Precision, ...]:
        """Return the precisions to search on a card: the mixed one it is made for, where the numerics allow it."""
        if self.precisions is not None:
            return tuple(self.precisions)
        return (precisions_of(device)[-1],) if allows(self.numerics, "reduced") else ("32-true",)

    def in_two(self) -> list[FleetRequest]:
        """Return the options of at most two searches at once, cards that share captures in the same one."""
        sharing: dict[tuple[object, ...], list[Device]] = defaultdict(list)
        for device in self.devices:
            sharing[self.precisions_for(device), family(device)].append(device)
        parts: tuple[list[Device], list[Device]] = [], []
        for group in sorted(sharing.values(), key=len, reverse=True):
            min(parts, key=len).extend(group)
        return [dataclasses.replace(self, devices=part) for part in parts if part]


@dataclass
class FleetSearch:
    """What was found, for which cards nothing fits, and what was assumed."""

    rows: list[FleetRow] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step_error: float = 0.0


def joined(searches: Sequence[FleetSearch]) -> FleetSearch:
    """Return the results of searches for different cards as those of one."""
    return FleetSearch(
        rows=[row for search in searches for row in search.rows],
        misfits=[misfit for search in searches for misfit in search.misfits],
        notes=list(dict.fromkeys(note for search in searches for note in search.notes)),
        step_error=max(search.step_error for search in searches),
    )


def search(workload: Workload, options: FleetRequest, progress: Progress) -> FleetSearch:
    """Return the fastest plan found for each card and number of ranks."""
    samples, found = samples_of(workload), FleetSearch()
    for device in options.devices:
        for precision in options.precisions or ():
            check_precision(precision, "precisions", device, workload)
    sizes = sorted(set(options.world_sizes))
    useful = [size for size in sizes if size <= samples]
    if len(useful) < len(sizes):
        found.notes.append(f"numbers of ranks above {samples} are left out: some ranks would have no sample")
    if not useful:
        raise UsageError(
            f"world_sizes= begins at {sizes[0]}, and the batch has {samples} samples, so some ranks"
            " would have none: give fewer ranks, or a larger Workload.batch"
        )
    waiting, menus, done = list(options.devices), dict[Precision, list[RegionSet]](), 0
    while waiting:
        progress("capture", len(options.devices) - len(waiting), len(options.devices))
        group = _Group(workload, dataclasses.replace(options, world_sizes=useful), waiting, menus, found, progress)
        for ranks in useful[:1] if group.is_whole else useful:
            for device in group.devices:
                done += 1
                progress("search", done, len(options.devices) * len(useful))
                group.search(device, ranks)
            group.steps.clear()  # no other number of ranks has them
        found.misfits += [least for name, least in group.least.items() if group.fastest[name] == math.inf]
        waiting = [device for device in waiting if device not in group.devices]
    found.notes = list(dict.fromkeys(found.notes))
    return found


class _Group:
    """The first card that waits and all that run its program, and the search for them.

    The first group solves `menus`: what is recomputed, from nothing to the lowest peak, by precision.
    """

    def __init__(
        self,
        workload: Workload,
        options: FleetRequest,
        waiting: Sequence[Device],
        menus: dict[Precision, list[RegionSet]],
        found: FleetSearch,
        progress: Progress,
    ) -> None:
        self.options, self.found, self.global_samples, first = options, found, samples_of(workload), waiting[0]
        searched = options.precisions_for(first)
        most = self.samples(options.world_sizes[0])
        self.programs = {precision: ScaledTrace(workload, first, precision, most) for precision in searched}
        traces = {precision: program.trace(most, most) for precision, program in self.programs.items()}
        self.devices = [
            card for card in waiting if options.precisions_for(card) == searched and runs_alike(first, card)
        ]
        plain = traces[searched[0]]
        found.notes += [note for note in plain.notes if not note.startswith("attention on ")]
        self.units = repeated_blocks(plain)
        self.menus: dict[Precision, list[RegionSet]] = {}
        for precision, trace in traces.items():
            if precision not in menus:
                progress("solve", len(menus), len(menus) + 1)
                menus[precision] = checkpoint_menu(trace, costs_of([trace], first), self.units)
            calls = Regions(trace).calls  # another program may lack some of the modules
            self.menus[precision] = [x for x in menus[precision] if all(r.modules[0] in calls for r in x)]
        why = coupling(plain, workload)
        self.couples = why is not None
        self.is_whole = self.couples and options.numerics != "changed"  # the batch is cut by nothing
        if self.is_whole:
            if options.world_sizes[0] > 1:
                raise UsageError(f"world_sizes= has no 1, and several ranks are not allowed: {why}")
            found.notes.append(f"one rank and one microbatch only: {why}")
        self.fastest = dict.fromkeys((device.name for device in self.devices), math.inf)
        self.least: dict[str, Misfit] = {}
        self.steps: dict[tuple[object, ...], _RankStep] = {}
        self._is_free: dict[tuple[str, int], bool] = {}  # whether memory limited no plan of a rank of so many samples
        self._alone: dict[tuple[object, ...], tuple[float, float]] = {}
        self._programs: dict[tuple[object, ...], list[_Program]] = defaultdict(list)

    def search(self, device: Device, ranks: int) -> None:
        """Note the fastest plan of a number of cards of a kind, or the least that they would hold."""
        each, key = self.options.each, (device.name, self.samples(ranks))
        # Do fewer cards as well? As many samples a rank have room: more cards would share the update only, and send
        # more. Whole nodes are looked at all the same, since they may keep copies of what is sharded. Or no step can be
        # faster.
        if not each and self._is_free.get(key, False) and ranks % device.cards_per_node:
            return
        bound = 0.0 if each else min(self.bound_seconds(levers, ranks, device) for levers in self.sizes(ranks))
        if not each and not is_faster(bound, self.fastest[device.name]):
            return
        row = _OneCard(self, device, ranks).fastest()
        if isinstance(row, Misfit):
            self.least[device.name] = min(self.least.get(device.name, row), row, key=lambda one: one.held_bytes)
            return
        self.fastest[device.name] = min(self.fastest[device.name], row.step_seconds)
        self._is_free[key] = not row.levers.regions and row.levers.microbatch_size == self.samples(ranks)
        self.found.rows.append(row)

    def samples(self, ranks: int) -> int:
        """Return the samples of the rank with the most."""
        return -(-self.global_samples // ranks)

    def sizes(self, ranks: int) -> list[Levers]:
        """Return the levers of each precision and microbatch size, the whole of a rank's samples first."""
        sizes = [self.samples(ranks)]
        while sizes[-1] > 1 and not self.is_whole and allows(self.options.numerics, "reordered"):
            sizes.append(-(-sizes[-1] // 2))
        return [Levers(precision=p, microbatch_size=size) for p in self.programs for size in sizes]

    def bound_seconds(self, levers: Levers, ranks: int, device: Device) -> float:
        """Return the least time of a step of one rank: all is computed once, nothing waits, and updates take no time.

        A sample alone is taken to need half of the time of two: its step need not be captured to leave it out.
        """
        samples = self.samples(ranks)
        if levers.microbatch_size == 1 < samples:
            return self.bound_seconds(replace(levers, microbatch_size=2), ranks, device)
        microbatches = max(1.0, samples / levers.microbatch_size)
        key = (device.name, levers.precision, levers.microbatch_size, samples if microbatches == 1 else 0)
        if key not in self._alone:
            trace = self.programs[levers.precision].trace(levers.microbatch_size, samples)
            costs = costs_of([trace], device)
            seconds = [costs.seconds_of(text) for text in trace.signatures]
            of_microbatches = [0.0, 0.0]  # of the first microbatch, and of each later one
            for op in trace.ops:
                if op.phase != "optimizer":
                    of_microbatches[min(op.microbatch, 1)] += seconds[op.signature]
            self._alone[key] = of_microbatches[0], of_microbatches[1]
        once, again = self._alone[key]
        return once + (microbatches - 1) * again

    def step(self, levers: Levers, samples: int) -> _RankStep:
        """Return the step of one rank, with its share of the update; levers' regions are none of its own."""
        key = (levers.precision, levers.microbatch_size, samples, levers.sharding)
        if key not in self.steps:
            trace = self.programs[levers.precision].trace(levers.microbatch_size, samples)
            if levers.sharding is not None:
                trace = with_share_of_update(shard(trace, levers.sharding), levers.sharding)
            alike = self._programs[trace.precision, len(trace.ops), len(trace.storages)]
            program = next((known for known in alike if known.trace.is_program_of(trace)), None)
            if program is None:
                alike.append(program := _Program(trace, self.menus[levers.precision]))
            self.steps[key] = _RankStep(trace, program)
        return self.steps[key]


class _OneCard:
    """The search for one kind of card and one number of ranks."""

    def __init__(self, group: _Group, device: Device, ranks: int) -> None:
        self.group, self.device, self.ranks = group, device, ranks
        self.samples = group.samples(ranks)
        self.budget_bytes = group.options.budget.nbytes(device_bytes=device.usable_bytes)
        self._plain_fits: dict[Levers, bool] = {}
        self._tried: list[tuple[_RankStep, int]] = []  # points that have no room by the simulated allocator

    def fastest(self) -> FleetRow | Misfit:
        """Return the fastest plan that fits, or else a `Misfit` with the least that a card would hold."""
        group, best = self.group, None
        lowest: list[float] = []  # live bytes of the sizes that have no room, others are among those tried
        bounded = [(group.bound_seconds(each, self.ranks, self.device), each) for each in group.sizes(self.ranks)]
        for bound, levers in sorted(bounded, key=lambda item: item[0]):
            if best is not None and not is_faster(bound, best.step_seconds):
                break  # as is every later one
            shardings = self._shardings(levers)
            if not self._fits_live(group.step(shardings[0], self.samples), 0):
                # Does it have room where the most is sharded and recomputed? Others hold more.
                step = group.step(max(shardings, key=_share), self.samples)
                live_bytes = self._live_upper(step, len(step.menu) - 1)
                if live_bytes > self.budget_bytes:
                    lowest.append(live_bytes)
                    continue
            for shared in shardings:
                sharding = shared.sharding
                if sharding is not None and sharding.mode == "zero3" and "zero2" in group.options.modes:
                    # Parameters would be gathered twice; keeping them gathered is as fast, where that has room.
                    kept = replace(shared, sharding=replace(sharding, mode="zero2", kept=()))
                    if self._plain_fits.get(kept, False):
                        continue
                best = self._faster(shared, best)
        if best is not None:
            return best
        held = [step.held_bytes(point, self.device) for step, point in self._tried]
        held_bytes = int(min([*(each[1] for each in held if each is not None), *lowest]))
        return Misfit(device=self.device.name, ranks=self.ranks, held_bytes=held_bytes, budget_bytes=self.budget_bytes)

    def _shardings(self, levers: Levers) -> list[Levers]:
        """Return levers with each sharding among the ranks, the simplest first; alone for one rank."""
        if self.ranks == 1:
            return [levers]
        reduces = ("last", "each") if levers.microbatch_size < self.samples else ("each",)
        found = proposals(self.ranks, self.group.options.modes, self.group.units, self.device.cards_per_node)
        return [replace(levers, sharding=replace(sharding, reduces=when)) for sharding in found for when in reduces]

    def _faster(self, levers: Levers, best: FleetRow | None) -> FleetRow | None:
        """Return the fastest point of some levers that fits where it beats the best so far, which stays otherwise."""
        than, device, options = math.inf if best is None else best.step_seconds, self.device, self.group.options
        step = self.group.step(levers, self.samples)
        if best is not None and not is_faster(step.replay(0, device).step_seconds(), than):
            self._plain_fits[levers] = True  # for what sends more: that is no faster either
            return best
        for point in range(self._first_with_room(step), len(step.menu)):
            seconds = step.replay(point, device).step_seconds()
            if not is_faster(seconds, than):
                break
            held = step.held_bytes(point, device, self.budget_bytes)
            if held is None:
                self._tried.append((step, point))
                continue
            self._plain_fits[levers] = point == 0
            chosen = replace(levers, regions=step.menu[point])
            uses = lever_uses(LeversOn(chosen, self.group.global_samples, self.group.couples))
            hours, price = seconds * options.steps / 3600, options.prices.get(device.name)
            return FleetRow(
                device=device.name,
                ranks=self.ranks,
                nodes=-(-self.ranks // device.cards_per_node),
                levers=chosen,
                uses=uses,
                numerics=freest(uses),
                budget_bytes=self.budget_bytes,
                peak_bytes=held[0],
                held_bytes=held[1],
                step_seconds=seconds,
                hours=hours,
                cost=None if price is None else price.per_hour * self.ranks * hours,
                currency="" if price is None else price.currency,
            )
        return best

    def _first_with_room(self, step: _RankStep) -> int:
        """Return the first point of the menu that fits by live bytes, by halving: peaks fall along it."""
        count = len(step.menu)
        if self._fits_live(step, 0):
            return 0
        if not self._fits_live(step, count - 1):
            return count
        low, high = 0, count - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits_live(step, middle) else (middle, high)
        return high

    def _fits_live(self, step: _RankStep, point: int) -> bool:
        return self._live_upper(step, point) <= self.budget_bytes

    def _live_upper(self, step: _RankStep, point: int) -> float:
        found = self.group.found
        found.step_error = max(found.step_error, step.on(self.device)[0].step_error)
        return step.peak_bytes(point, self.device) * step.excess(self.device)


def _share(levers: Levers) -> tuple[int, int, int, bool]:
    """Return how much of the state is cut: the most sharded is the largest."""
    if (sharding := levers.sharding) is None:
        return 0, 0, 0, False
    rank = ("ddp", "zero1", "zero2", "zero3").index(sharding.mode)
    return rank, sharding.shards, -len(sharding.kept), sharding.reduces == "each"


class ScaledTrace:
    """The step of one rank in one precision, for any number of samples, as some cards run it."""

    def __init__(self, workload: Workload, device: Device, precision: Precision, most: int) -> None:
        self.workload, self.device, self.precision = workload, device, precision
        self._captures = Captures(workload, device)
        self._most = {True: most, False: min(most, samples_of(workload)) // 2}  # of a whole step, of microbatches
        self._known: dict[tuple[bool, int], Trace] = {}

    def trace(self, size: int, samples: int) -> Trace:
        """Return the step of a rank with some samples, in microbatches of a size."""
        if size >= samples:
            return self._sized(samples, is_whole=True)
        trace = self._sized(size, is_whole=False)
        if trace.microbatches == 2:
            return trace.of_samples(samples)
        return self._captured(size, samples)  # microbatches differ: all of them are captured

    def _sized(self, size: int, *, is_whole: bool) -> Trace:
        """Return the step of a size: a captured one, or from two that were."""
        if (is_whole, size) not in self._known:
            found, most = None, self._most[is_whole]
            if _LOW < size != most > _LOW + 1:
                low, high = (self._sized(end, is_whole=is_whole) for end in (_LOW, most))
                found = between(low, high, size)
            samples = size if is_whole else samples_of(self.workload)
            self._known[is_whole, size] = found or self._captured(size, samples)
        return self._known[is_whole, size]

    def _captured(self, size: int, samples: int) -> Trace:
        captures = self._captures
        if samples != samples_of(self.workload):
            from memfit.ranks import with_samples  # distributed packages take a second to import

            captures = Captures(with_samples(self.workload, samples), self.device)
        return captures(Levers(precision=self.precision, microbatch_size=size))


@dataclass
class _Program:
    """One program, of which only bytes and costs differ by samples, ranks and cards, with what was found of it.

    What a step holds is known by the bytes of its storages and workspaces: other samples and ranks may have the same.
    """

    trace: Trace
    menu: list[RegionSet]  # what is recomputed, from nothing to the lowest peak
    replays: dict[int, Replay] = field(default_factory=dict)
    peaks: dict[tuple[object, ...], int] = field(default_factory=dict)
    held: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    exceeded: dict[tuple[object, ...], float] = field(default_factory=dict)


class _RankStep:
    """The step of one rank on paper, with the modules of a point of the menu recomputed."""

    def __init__(self, trace: Trace, program: _Program) -> None:
        self.trace, self.menu, self._program = trace, program.menu, program
        self._storages = _digest(trace.storage_bytes)
        self._on: dict[str, tuple[CostTable, bytes]] = {}
        self._replays: dict[int, Replay] = {}

    def on(self, device: Device) -> tuple[CostTable, bytes]:
        """Return the costs on a card, and a digest of the workspaces."""
        if device.name not in self._on:
            costs = costs_of([self.trace], device)
            sizes = [costs.of(text).workspace_bytes for text in self.trace.signatures]
            # By operator, since signatures are numbered otherwise for another number of samples.
            of_ops = np.array(sizes, np.int64)[self.trace.op_signatures]
            self._on[device.name] = costs, _digest(of_ops, costs.resident_workspace_bytes)
        return self._on[device.name]

    def excess(self, device: Device) -> float:
        """Return the upper end of the peak, as a multiple of it."""
        return (1 + self.on(device)[0].peak_error) * (1 + self.trace.slack)

    def replay(self, point: int, device: Device) -> Replay:
        costs, known = self.on(device)[0], self._program.replays
        if point not in self._replays:
            if point not in known:
                known[point] = Replay(self._program.trace, costs, self.menu[point])
            self._replays[point] = known[point].under(costs, self.trace)
        return self._replays[point].under(costs)

    def peak_bytes(self, point: int, device: Device) -> int:
        """Return the most live bytes."""
        key = (point, self._storages, self.on(device)[1])
        if key not in self._program.peaks:
            self._program.peaks[key] = self.replay(point, device).peak_bytes()
        return self._program.peaks[key]

    def held_bytes(self, point: int, device: Device, most: float = math.inf) -> tuple[int, int] | None:
        """Return the peak allocated, and what is held against the budget, as `predict` has them; None for more."""
        excess, settings = self.excess(device), device.allocator
        if device.kind == "cpu":
            found = (self.peak_bytes(point, device),) * 2
        else:  # the most that the simulated allocator has allocated and reserved
            # Else the card's memory changes nothing.
            limited = settings.memory_fraction < 1 or settings.expandable_segments
            own = (point, self._storages, self.on(device)[1])
            key, most_reserved = (*own, settings, device.memory_bytes if limited else 0), (most + 1) / excess
            held, exceeded = self._program.held, self._program.exceeded
            if key not in held:
                if most_reserved <= exceeded.get(key, -1):
                    return None
                events = self.replay(point, device).allocations(is_labelled=False)
                report = replay_allocations(
                    events, settings, total_bytes=device.memory_bytes, until_reserved_bytes=most_reserved
                )
                if report.peak_reserved_bytes > most_reserved:
                    exceeded[key] = most_reserved
                    return None
                held[key] = report.peak_allocated_bytes, report.peak_reserved_bytes
            found = held[key]
            if found[1] > most_reserved:
                return None
        held_bytes = int(found[1] * excess)
        return (found[0], held_bytes) if held_bytes <= most else None


def _digest(sizes: npt.NDArray[np.int64], more: int = 0) -> bytes:
    """Return a digest of some sizes in bytes: as a key it is small, and the sizes are tens of kilobytes."""
    return hashlib.blake2b(sizes.tobytes() + more.to_bytes(8, "little"), digest_size=16).digest()


def checkpoint_menu(trace: Trace, costs: CostTable, units: Sequence[str]) -> list[RegionSet]:
    """Return what may be recomputed, from nothing to the lowest peak, each point slower and lower than the last.

    A few budgets are solved. Between them lie parts of each solution: modules of a model are much alike, so that half
    of them save about half. Only modules alone are taken, none of them around what `fully_shard` gathers by itself.
    """
    regions = Regions(trace)
    around_units = {fqn for unit in units for fqn in enclosing(unit) if fqn != unit}
    choices = [
        option
        for option in options(regions, costs)
        if all(len(region.modules) == 1 and region.modules[0] not in around_units for region in option.regions)
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
    points = [nothing]
    for x in solutions:
        chosen = np.nonzero(x)[0]
        for count in range(1, len(chosen) + 1):
            points.append(np.zeros_like(x))
            points[-1][chosen[:count]] = 1
    falling, peaks = list[Ints](), list[int]()  # of these, none is as fast and as low as another
    for x in sorted(points, key=lambda x: (problem.seconds(x), problem.peak_bytes(x))):
        if not peaks or problem.peak_bytes(x) < peaks[-1]:
            falling.append(x)
            peaks.append(problem.peak_bytes(x))
    wanted = np.linspace(peaks[0], peaks[-1], _MENU)  # so many, about evenly by their peaks
    nearest = {min(range(len(peaks)), key=lambda i: abs(peaks[i] - peak)) for peak in wanted}
    return [problem.regions(falling[i]) for i in sorted({0, *nearest, len(peaks) - 1})]

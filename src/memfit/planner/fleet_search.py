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
6. Cards that share no captures are searched at once, in a process each (`FleetRequest.in_two`).

What fits is held against the budget as `memfit.plan` holds it: by what the simulated allocator reserves, with its
error bar.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.fake_gpu.fake_cuda import family, runs_alike
from memfit.hardware.catalogue import precisions as precisions_of
from memfit.ir.device import Device
from memfit.ir.fleet import FleetRow, Misfit, Price
from memfit.ir.plan import Levers, Numerics, Precision, allows, freest
from memfit.ir.sharding import Mode
from memfit.ir.trace import Trace
from memfit.levers import registry
from memfit.levers.lever import LeversOn
from memfit.planner.batch_coupling import coupling
from memfit.planner.prediction import check_precision, costs_of
from memfit.planner.rank_steps import RankModel, RegionSet, ScaledTrace, checkpoint_menu, menu_of
from memfit.planner.search import is_faster
from memfit.sharding.groups import repeated_blocks
from memfit.sharding.one_rank import proposals
from memfit.units import Budget, Progress
from memfit.workload import Workload, samples_of


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """The options of `memfit.fleet`, made definite and checked.

    Attributes:
        devices: Cards.
        steps: Optimizer updates of the whole training.
        world_sizes: Numbers of ranks.
        modes: Ways in which ranks may share the step.
        precisions: Precisions to search; None for the one that suits each card and `numerics`.
        prices: The user's prices, by card.
        each: Whether to solve for numbers of ranks that can't be faster than fewer.
    """

    devices: Sequence[Device]
    budget: Budget
    steps: int
    world_sizes: Sequence[int]
    modes: Sequence[Mode]
    numerics: Numerics
    precisions: Sequence[Precision] | None
    prices: Mapping[str, Price]
    each: bool

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


class FleetSearch(NamedTuple):
    """What was found, for which cards nothing fits, and what was assumed."""

    rows: list[FleetRow]
    misfits: list[Misfit]
    notes: list[str]
    step_error: float


def search(workload: Workload, options: FleetRequest, progress: Progress) -> FleetSearch:
    """Return the fastest plan found for each card and number of ranks.

    Raises:
        CaptureError: The step can't be captured.
        UsageError: A precision is not one of a card's.
    """
    return _Search(workload, options, progress).result()


def joined(searches: Sequence[FleetSearch]) -> FleetSearch:
    """Return the results of searches for different cards as those of one."""
    return FleetSearch(
        rows=[row for search in searches for row in search.rows],
        misfits=[misfit for search in searches for misfit in search.misfits],
        notes=list(dict.fromkeys(note for search in searches for note in search.notes)),
        step_error=max(search.step_error for search in searches),
    )


class _Point(NamedTuple):
    """A point that was looked at: what the step would be, and what it takes."""

    levers: Levers
    peak_bytes: int
    held_bytes: int
    step_seconds: float


class _Search:
    def __init__(self, workload: Workload, options: FleetRequest, progress: Progress) -> None:
        self.workload, self.options, self.progress = workload, options, progress
        self.samples = samples_of(workload)
        self.rows: list[FleetRow] = []
        self.misfits: list[Misfit] = []
        self.notes: list[str] = []
        self.step_error = 0.0
        self.done = 0

    def result(self) -> FleetSearch:
        waiting = list(self.options.devices)
        for device in waiting:
            for precision in self.options.precisions or ():
                check_precision(precision, "precisions", device, self.workload)
        menus: dict[Precision, list[RegionSet]] = {}
        while waiting:
            group, waiting = self._group(waiting, menus)
            group.run()
        return FleetSearch(self.rows, self.misfits, list(dict.fromkeys(self.notes)), self.step_error)

    def _group(self, waiting: list[Device], menus: dict[Precision, list[RegionSet]]) -> tuple[_Group, list[Device]]:
        """Return the first card that waits with all that run its program, and the others."""
        options, first = self.options, waiting[0]
        searched = options.precisions_for(first)
        sizes = self.world_sizes
        most = -(-self.samples // sizes[0])
        self.progress("capture", len(options.devices) - len(waiting), len(options.devices))
        programs = {precision: ScaledTrace(self.workload, first, precision, most) for precision in searched}
        traces = {precision: program.trace(most, most) for precision, program in programs.items()}
        alike = [
            device for device in waiting if options.precisions_for(device) == searched and runs_alike(first, device)
        ]
        plain = traces[searched[0]]
        self.notes += [note for note in plain.notes if not note.startswith("attention on ")]
        units = repeated_blocks(plain)
        for precision, trace in traces.items():
            if precision not in menus:
                self.progress("solve", len(menus), len(menus) + 1)
                menus[precision] = checkpoint_menu(trace, costs_of([trace], first), units)
        fitting = {precision: menu_of(menus[precision], trace) for precision, trace in traces.items()}
        group = _Group(self, alike, RankModel(programs, fitting), units, self._couples(plain))
        return group, [device for device in waiting if device not in alike]

    @functools.cached_property
    def world_sizes(self) -> list[int]:
        """Return the numbers of ranks that have a sample each, from the fewest."""
        sizes = sorted(set(self.options.world_sizes))
        useful = [size for size in sizes if size <= self.samples]
        if len(useful) < len(sizes):
            self.notes.append(f"numbers of ranks above {self.samples} are left out: some ranks would have no sample")
        if not useful:
            raise UsageError(
                f"world_sizes= begins at {sizes[0]}, and the batch has {self.samples} samples, so some ranks"
                " would have none: give fewer ranks, or a larger Workload.batch"
            )
        return useful

    def _couples(self, trace: Trace) -> bool:
        """Tell whether samples are coupled; note what that leaves out where the numerics don't allow another training.

        Raises:
            UsageError: It leaves out every number of ranks.
        """
        found = coupling(trace, self.workload)
        if found is None or self.options.numerics == "changed":
            return found is not None
        if self.world_sizes[0] > 1:
            raise UsageError(f"world_sizes= has no 1, and several ranks are not allowed: {found}")
        self.notes.append(f"one rank and one microbatch only: {found}")
        return True

    def advance(self) -> None:
        self.done += 1
        self.progress("search", self.done, len(self.options.devices) * len(self.world_sizes))


class _Group:
    """The search for cards that run one program."""

    def __init__(
        self, search: _Search, devices: list[Device], model: RankModel, units: tuple[str, ...], couples: bool
    ) -> None:
        self.search, self.devices, self.model, self.units = search, devices, model, units
        self.options, self.couples = search.options, couples
        self.is_whole = couples and search.options.numerics != "changed"  # the batch is cut by nothing
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
                if not self.options.each and self._is_beaten(ranks, device, fastest[device.name], free.get(key, False)):
                    continue
                budget_bytes = self.options.budget.nbytes(device_bytes=device.usable_bytes)
                found = _OneCard(self, device, ranks, budget_bytes).fastest()
                if isinstance(found, Misfit):
                    kept = least.get(device.name, found)
                    least[device.name] = min(kept, found, key=lambda each: each.held_bytes)
                    continue
                fastest[device.name] = min(fastest[device.name], found.step_seconds)
                free[key] = not found.levers.regions and found.levers.microbatch_size == self.samples(ranks)
                self.search.rows.append(found)
            self.model.forget()
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
        while sizes[-1] > 1 and not self.is_whole and allows(self.options.numerics, "reordered"):
            sizes.append(-(-sizes[-1] // 2))
        return [Levers(precision=p, microbatch_size=size) for p in self.model.programs for size in sizes]

    def shardings(self, levers: Levers, ranks: int, device: Device) -> list[Levers]:
        """Return levers with each sharding among some ranks, the simplest first; alone for one rank."""
        if ranks == 1:
            return [levers]
        reduces = ("last", "each") if levers.microbatch_size < self.samples(ranks) else ("each",)
        return [
            replace(levers, sharding=replace(sharding, reduces=when))
            for sharding in proposals(ranks, self.options.modes, self.units, device.cards_per_node)
            for when in reduces
        ]

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
            self._alone[key] = self._parts(levers, samples, device)
        once, again = self._alone[key]
        return once + (microbatches - 1) * again

    def _parts(self, levers: Levers, samples: int, device: Device) -> tuple[float, float]:
        """Return the seconds of the first microbatch, and of each later one; updates are left out."""
        trace = self.model.programs[levers.precision].trace(levers.microbatch_size, samples)
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
        self.model, self.samples = group.model, group.samples(ranks)
        self._lowest: dict[Levers, float] = {}
        self._plain_fits: dict[Levers, bool] = {}
        self._tried: list[tuple[Levers, int]] = []  # points that have no room by the simulated allocator

    def fastest(self) -> FleetRow | Misfit:
        """Return the fastest plan that fits, or else a `Misfit` with the least that a card would hold."""
        best: _Point | None = None
        bounded = [
            (self.group.bound_seconds(each, self.ranks, self.device), each) for each in self.group.sizes(self.ranks)
        ]
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
        return self._row(best)

    def _row(self, best: _Point) -> FleetRow:
        search, options, name = self.group.search, self.group.options, self.device.name
        uses = registry.uses(LeversOn(best.levers, search.samples, self.group.couples))
        hours, price = best.step_seconds * options.steps / 3600, options.prices.get(name)
        return FleetRow(
            device=name,
            ranks=self.ranks,
            nodes=-(-self.ranks // self.device.cards_per_node),
            levers=best.levers,
            uses=uses,
            numerics=freest(uses),
            budget_bytes=self.budget_bytes,
            peak_bytes=best.peak_bytes,
            held_bytes=best.held_bytes,
            step_seconds=best.step_seconds,
            hours=hours,
            cost=None if price is None else price.per_hour * self.ranks * hours,
            currency="" if price is None else price.currency,
        )

    def _has_room(self, levers: Levers) -> bool:
        """Tell whether a size fits by live bytes where the most is sharded and recomputed: others hold more."""
        shardings = self.group.shardings(levers, self.ranks, self.device)
        if self._live_upper(shardings[0], 0) <= self.budget_bytes:
            return True
        if levers not in self._lowest:
            leanest = max(shardings, key=_share)
            self._lowest[levers] = self._live_upper(leanest, len(self.model.menus[levers.precision]) - 1)
        return self._lowest[levers] <= self.budget_bytes

    def _gathers_for_nothing(self, levers: Levers) -> bool:
        """Tell whether parameters would be gathered twice though keeping them gathered has room: that is as fast."""
        sharding = levers.sharding
        if sharding is None or sharding.mode != "zero3" or "zero2" not in self.group.options.modes:
            return False
        kept = replace(levers, sharding=replace(sharding, mode="zero2", kept=()))
        return self._plain_fits.get(kept, False)

    def _live_upper(self, levers: Levers, point: int) -> float:
        return self.model.peak_bytes(levers, self.samples, point, self.device) * self._excess(levers)

    def _excess(self, levers: Levers) -> float:
        costs, trace = self.model.costs(levers, self.samples, self.device), self.model.sharded(levers, self.samples)
        self.group.search.step_error = max(self.group.search.step_error, costs.step_error)
        return (1 + costs.peak_error) * (1 + trace.slack)

    def _faster(self, levers: Levers, best: _Point | None) -> _Point | None:
        """Return the fastest point of some levers that fits where it beats the best so far, which stays otherwise."""
        than = math.inf if best is None else best.step_seconds
        plain = self.model.replay(levers, self.samples, 0, self.device)
        if best is not None and not is_faster(plain.step_seconds(), than):
            self._plain_fits[levers] = True  # for what sends more: that is no faster either
            return best
        menu, first = self.model.menus[levers.precision], self._first_with_room(levers)
        for point in range(first, len(menu)):
            seconds = self.model.replay(levers, self.samples, point, self.device).step_seconds()
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
        count = len(self.model.menus[levers.precision])
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
            allocated = reserved = self.model.peak_bytes(levers, self.samples, point, self.device)
        else:
            found = self.model.held_bytes(levers, self.samples, point, self.device, (most + 1) / excess)
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

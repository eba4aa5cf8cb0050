"""The peak of a step as a linear function of which regions are checkpointed.

Variables: `x[j]`, binary, for each option (a region and its kept operators); `z[k]`, for each set of reasons why
storages outlive their release. A storage is alive after its release while any of its keepers (`ir.regions.Keepers`)
is active; with several keepers, `z` is at least each one's activity, which is affine in `x` (`Tightening`). The bytes
alive at each point of the step, and at the peak of each recomputation, are then affine in `(x, z)`, and a budget is one
inequality for each point. With `x` fixed and the smallest `z` the bytes are those of `ir.simulate`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.ir import (
    CostTable,
    Keepers,
    Recomputation,
    Region,
    RegionCall,
    Regions,
)
from memfit.solver.candidates import Ints, Option

NO_ROOM = 2**62
"""The peak of a choice that exceeds the host's budget."""
Activity = tuple[bool, frozenset[int]]
"""A reason that keeps a storage alive, as (lost, options): 1 minus the sum of their x where `lost`, else the sum."""
ALWAYS: Activity = (True, frozenset())
_Line = defaultdict[int, int]  # changes of the bytes alive, by their places


class Tightening:
    """A tightening of activities into fewer and stronger ones.

    A storage is alive if any of its activities is 1. At most one of the options that exclude each other is chosen, so
    that the activities within such a set join into a single one, which is 1 for the same choices and larger for
    fractions of them: the storage is alive unless an option is chosen by which all of them are lost.
    """

    def __init__(self, conflicts: Sequence[frozenset[int]]) -> None:
        self.cliques = [_mask(members) for members in conflicts]
        self.with_option: dict[int, list[int]] = defaultdict(list)  # the cliques that an option is in
        for index, members in enumerate(conflicts):
            for j in members:
                self.with_option[j].append(index)
        self.found: dict[frozenset[Activity], frozenset[Activity]] = {}

    def __call__(self, activities: Collection[Activity]) -> frozenset[Activity]:
        """Return activities with the same maximum for every choice, and at least that maximum for fractions."""
        key = frozenset(activities)
        if key in self.found:
            return self.found[key]
        if ALWAYS in key:
            return frozenset({ALWAYS})
        losing = {_mask(members) for is_lost, members in key if is_lost}
        gaining = {_mask(members) for is_lost, members in key if not is_lost and members}
        gained = functools.reduce(operator.or_, gaining, 0)
        lost, won = {m & ~gained for m in losing}, set(gaining)
        touched = {min(members) for is_lost, members in key if is_lost} | {*_members(gained)}
        for clique in (self.cliques[i] for i in sorted({i for j in touched for i in self.with_option.get(j, ())})):
            within = [m for m in losing if not m & ~clique]
            if within:
                lost.add(functools.reduce(operator.and_, within) & ~gained)
                won -= {m for m in gaining if not m & ~clique}  # no larger than the one just added
            elif gained & clique:
                won.add(gained & clique)
        least = [m for m in lost if not any(rival != m and not rival & ~m for rival in lost)]
        largest = [m for m in won if not any(rival != m and not m & ~rival for rival in won)]
        self.found[key] = frozenset({(True, _members(m)) for m in least} | {(False, _members(m)) for m in largest})
        return self.found[key]


def _mask(members: Collection[int]) -> int:
    return sum(1 << j for j in members)


@functools.lru_cache(1 << 14)  # options of a block's regions come again and again
def _members(mask: int) -> frozenset[int]:
    found = set[int]()
    while mask:
        found.add(mask.bit_length() - 1)
        mask ^= 1 << mask.bit_length() - 1
    return frozenset(found)


class Row(NamedTuple):
    """A point of the step: its place on the axis, and for a recomputation's peak, its option and bytes."""

    axis: int
    option: int = -1
    nbytes: int = 0


class Columns:
    """Bytes alive at each place of an axis for variables at 1: where each one changes, which is at few places.

    Args:
        variables: The variable of each change.
        places: The place of each change.
        nbytes: The bytes by which each changes what is alive from its place on.
        count: The number of variables.
        length: The number of places.
    """

    def __init__(self, variables: Ints, places: Ints, nbytes: Ints, count: int, length: int) -> None:
        self._variables, self._places, self._nbytes = variables, places, nbytes
        self._count, self._length = count, length

    @classmethod
    def of_matrix(cls, columns: Ints) -> Columns:
        """Return columns given with all their places, [variables, places]."""
        changes = np.diff(columns, axis=1, prepend=0)
        variables, places = np.nonzero(changes)
        return cls(variables, places, changes[variables, places], *changes.shape)

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[int, int]], length: int) -> Columns:
        """Return columns given by each variable's changes, by their places; those past the axis are left out."""
        entries = [(j, at, nbytes) for j, line in enumerate(lines) for at, nbytes in line.items() if at < length]
        variables, places, nbytes = np.array(entries, np.int64).reshape(-1, 3).T
        return cls(variables, places, nbytes, len(lines), length)

    def total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the bytes at all places together, for values of the variables, which may be fractional."""
        changes = np.bincount(self._places, self._nbytes * values[self._variables], self._length)
        total = np.cumsum(changes)
        return total if values.dtype.kind == "f" else np.rint(total).astype(np.int64)

    def at(self, places: Ints) -> Ints:
        """Return the bytes at some places, [variables, places]."""
        wanted, inverse = np.unique(places, return_inverse=True)
        found = np.zeros((self._count, len(wanted) + 1), np.int64)
        np.add.at(found, (self._variables, np.searchsorted(wanted, self._places)), self._nbytes)
        totals: Ints = np.cumsum(found, axis=1)[:, inverse]
        return totals

    def merged(self, variables: Ints, count: int) -> Columns:
        """Return the columns of fewer variables, as many as `count`, by the one that each becomes; -1 for none."""
        owners = variables[self._variables]
        kept = owners >= 0
        return Columns(owners[kept], self._places[kept], self._nbytes[kept], count, self._length)


@dataclass
class Problem:
    """A linear model of a trace's peak."""

    options: list[Option]  # of each `x`
    reasons: list[frozenset[Activity]]  # that are lower bounds of each `z`
    conflicts: list[frozenset[int]]  # sets of options of which at most one can be chosen
    base: Ints  # bytes alive at each place of the axis for every choice
    columns: Columns  # for each variable (x, then z), bytes alive at each place where it is 1
    rows: list[Row]  # the points whose bytes the budget limits
    plain_seconds: float  # of the step with nothing checkpointed
    host_budget_bytes: int = 0  # host memory that the options may take together

    def __post_init__(self) -> None:
        activities = [activity for reasons in self.reasons for activity in reasons]
        entries = [(row, j, -1 if lost else 1) for row, (lost, members) in enumerate(activities) for j in members]
        self._terms = np.array(entries, np.int64).reshape(-1, 3).T
        self._constants = np.array([int(lost) for lost, _ in activities], np.int64)
        self._starts = np.cumsum([0, *map(len, self.reasons)])[:-1]
        self.row_axis, self.row_option, self.row_bytes = np.array(self.rows, np.int64).reshape(-1, 3).T
        self.host_bytes = np.array([o.host_bytes for o in self.options], np.int64)

    def peak_bytes(self, x: Ints) -> int:
        """Return the peak of a choice of options; `NO_ROOM` for one that exceeds the host's budget."""
        if int(self.host_bytes @ x) > self.host_budget_bytes:
            return NO_ROOM
        return int(self.row_peaks(x).max(initial=0))

    def row_peaks(self, x: Ints) -> Ints:
        """Return the bytes at every row for a choice; rows of recomputations not chosen count as their point."""
        return self.live_bytes(x, self.kept(x))

    def kept(self, x: Ints) -> Ints:
        """Return the value of each z for a choice of options: whether one of its activities is 1."""
        rows, columns, signs = self._terms
        changes = np.bincount(rows, signs * x[columns], len(self._constants)).astype(np.int64)
        activities = self._constants + changes
        return np.maximum.reduceat(activities, self._starts) if self.reasons else activities

    def live_bytes(self, x: npt.NDArray[Any], z: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the bytes at every row for values of the variables, which may be fractional."""
        live: npt.NDArray[Any] = self.base + self.columns.total(np.concatenate([x, z]))
        chosen = np.append(x, 0)[self.row_option]  # -1, no option, takes the last
        return live[self.row_axis] + np.where(self.row_option >= 0, self.row_bytes * chosen, 0)

    def seconds(self, x: Ints) -> float:
        """Return the step's time for a choice of options."""
        return self.plain_seconds + float(sum(o.seconds for o, chosen in zip(self.options, x, strict=True) if chosen))

    def regions(self, x: Ints) -> tuple[Region, ...]:
        """Return the regions of a choice of options, for a plan."""
        return tuple(r for o, chosen in zip(self.options, x, strict=True) if chosen for r in o.regions)


def build(regions: Regions, costs: CostTable, options: list[Option], host_budget_bytes: int = 0) -> Problem:
    """Return the linear model of a trace with some options, and a budget of host memory."""
    return _Builder(regions, costs, options).problem(host_budget_bytes)


class _Builder:
    def __init__(self, regions: Regions, costs: CostTable, options: list[Option]) -> None:
        self.regions, self.trace, self.costs, self.options = regions, regions.trace, costs, options
        self.options_of: dict[RegionCall, list[int]] = defaultdict(list)
        self.moves: dict[int, dict[int, int]] = defaultdict(dict)  # by storage and option: end of its copy to the host
        for j, option in enumerate(options):
            for region in option.kept:
                self.options_of[region].append(j)
            for transfer in option.transfers:
                self.moves[transfer.storage][j] = max(transfer.landed, self.moves[transfer.storage].get(j, -1))
        self.keepers = Keepers(regions, self.options_of)
        # The largest sets of options that contain the same module call.
        calls = {call for region in self.options_of for call in region.calls}
        chains = {frozenset(j for r in self.keepers.around(call) for j in self.options_of[r]) for call in calls}
        self.conflicts = [c for c in chains if len(c) > 1 and not any(c < larger for larger in chains)]
        self.tightened = Tightening(self.conflicts)
        # A place for each operator, and before it one for each recomputation that may start there.
        orders = sorted({again.order for option in options for again in option.recomputations})
        starts = [at for at, *_ in orders]
        self.op_axis = [op + bisect.bisect_right(starts, op) for op in range(len(self.trace.ops))]
        self.gap_axis = {order: order[0] + i for i, order in enumerate(orders)}
        self.length = len(self.op_axis) + len(orders)
        self.base = np.zeros(self.length + 1, np.int64)
        self.x: list[_Line] = [defaultdict(int) for _ in options]
        self.z: dict[frozenset[Activity], _Line] = defaultdict(lambda: defaultdict(int))

    def problem(self, host_budget_bytes: int) -> Problem:
        workspaces, seconds = self.costs.op_workspaces(self.trace), self.costs.op_seconds(self.trace)
        workspace: list[int] = workspaces.tolist()
        for op, overhead in self.costs.captured_overheads(self.trace).items():
            seconds[op] += overhead
        for index in range(len(self.trace.storages)):
            self._add_original(index)
        rows = [Row(axis) for axis in self.op_axis]
        for j, option in enumerate(self.options):
            gaps = {again.region: self.gap_axis[again.order] for again in option.recomputations}
            moved = frozenset(transfer.storage for transfer in option.transfers)
            for again in option.recomputations:
                self._add_copies(j, again, gaps)
                added = self.regions.added_bytes(again, workspace, moved).max(initial=0)
                peak = int(added) + self.regions.generator_state_bytes * again.states
                rows.append(Row(self.gap_axis[again.order], j, peak))
        base = np.cumsum(self.base)[: self.length] + self.costs.resident_workspace_bytes
        base[self.op_axis] += workspaces
        columns = Columns.of_lines([*self.x, *self.z.values()], self.length)
        plain_seconds = float(np.dot(seconds, self.trace.repeats))
        reasons = list(self.z)
        return Problem(self.options, reasons, self.conflicts, base, columns, rows, plain_seconds, host_budget_bytes)

    def _add_original(self, index: int) -> None:
        """Add a storage that the step allocates, until its release or while something keeps it."""
        storage, moves = self.trace.storages[index], self.moves[index]
        birth, nbytes = storage.birth, storage.nbytes
        first = 0 if birth < 0 else self._place(birth)
        if birth < 0 or self.trace.ops[birth].phase != "forward":
            self._mark(self.base, first, self._place(storage.death), nbytes)
            return

        def stays(j: int, region: RegionCall) -> bool:
            """Tell whether an option keeps it as an output of a region call, on the device."""
            return birth in self.options[j].kept[region] and j not in moves

        released = self._place(storage.release)
        self._mark(self.base, first, released, nbytes)
        ends: dict[int, set[Activity]] = defaultdict(set)
        for keeper in self.keepers.of(index):
            if keeper.needs is not None:
                activity = False, frozenset(j for j in self.options_of[keeper.needs] if j not in moves)
            else:
                losing = (j for region in keeper.lost_in for j in self.options_of[region] if not stays(j, region))
                activity = True, frozenset(losing)
            ends[self._place(keeper.end)].add(activity)
        for region in self.keepers.around(self.trace.ops[birth].call):  # until the recomputation takes it
            for j in self.options_of[region]:
                if stays(j, region):
                    again = next(a for a in self.options[j].recomputations if a.region is region)
                    ends[self.gap_axis[again.order] - 1].add((False, frozenset({j})))
        for j, landed in moves.items():
            ends[self._place(landed)].add((False, frozenset({j})))
        active: set[Activity] = set()
        later = sorted((end for end in ends if end > released), reverse=True)
        for end, before in itertools.pairwise([*later, released]):  # while any keeper with a later end is active
            active |= ends[end]
            reasons = self.tightened(active)
            if ALWAYS in reasons:
                self._mark(self.base, before + 1, end, nbytes)
            elif len(reasons) == 1:
                ((lost, members),) = reasons
                if lost:
                    self._mark(self.base, before + 1, end, nbytes)
                for j in members:
                    self._mark(self.x[j], before + 1, end, -nbytes if lost else nbytes)
            else:
                self._mark(self.z[reasons], before + 1, end, nbytes)

    def _add_copies(self, j: int, again: Recomputation, gaps: Mapping[RegionCall, int]) -> None:
        gap, region = gaps[again.region], again.region
        for call in region.calls:
            first, last = self._place(self.trace.calls[call].start), self._place(region.end)
            self._mark(self.x[j], first, last, self.regions.generator_state_bytes)
        for copy in again.copies:
            if copy.survives:
                last = self._place(copy.death) if copy.death >= 0 else gap
                last = max(last, gaps[copy.taken_by]) if copy.taken_by is not None else last
                self._mark(self.x[j], gap + 1, last, self.trace.storages[copy.storage].nbytes)
        for transfer in self.options[j].transfers_of(region):
            first = self._place(transfer.fetched - 1) + 1 if transfer.fetched >= 0 else gap
            last = max(gap, self._place(transfer.death) if transfer.death >= 0 else -1)
            last = max(last, gaps[transfer.taken_by]) if transfer.taken_by is not None else last
            self._mark(self.x[j], first, last, self.trace.storages[transfer.storage].nbytes)

    def _place(self, op: int) -> int:
        return self.op_axis[op] if op < len(self.op_axis) else self.length - 1

    def _mark(self, line: Ints | _Line, first: int, last: int, nbytes: int) -> None:
        if last >= first:
            line[first] += nbytes
            line[min(last, self.length - 1) + 1] -= nbytes

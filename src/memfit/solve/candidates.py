"""Which modules may be checkpointed, and what each could keep."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.ir.cost import CostTable
from memfit.ir.remat import Keep, RegionCall, Regions
from memfit.ir.simulate import overhead_seconds, repeats
from memfit.ir.trace import Trace

_KEPT_SHARES = (0.3, 0.6, 0.85, 0.97)
_EXPENSIVE_SHARE = 0.02
_LEAST_SHARE = 0.002
_CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class Option:
    """One way to checkpoint a region.

    Attributes:
        fqn: The region's module.
        keep: The operators whose outputs are kept.
        kept: For each call of the region, those operators.
        seconds: What it adds to the step.
    """

    fqn: str
    keep: Keep
    kept: dict[int, set[int]]
    seconds: float


def refusals(regions: Regions) -> dict[str, str]:
    """Return why modules can't be checkpointed, by FQN: what they do would be done twice."""
    trace = regions.trace
    refused: dict[str, str] = {}
    checkpointed = {trace.modules[c.module].fqn for c in trace.calls if c.phase == "recompute"}
    for fqn, calls in regions.calls.items():
        if any(_related(fqn, other) for other in checkpointed):
            refused[fqn] = "is checkpointed by the model itself"
            continue
        for region in calls:
            culprit = _writes_outside(trace, region)
            if culprit is not None:
                refused[fqn] = f"changes what was there before ({culprit}), which a recomputation would do again"
    return refused


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _writes_outside(trace: Trace, region: RegionCall) -> str | None:
    """Return the operator of a region call that writes to a storage from before it, running statistics aside."""
    for index in range(region.start, trace.calls[region.call].end):
        for mutated in trace.ops[index].mutates:
            storage = trace.storages[mutated]
            statistics = storage.owner >= 0 and trace.modules[storage.owner].tracks_statistics
            if storage.birth < region.start and not (storage.category == "buffers" and statistics):
                return trace.ops[index].name
    return None


def options(regions: Regions, costs: CostTable, excluded: Collection[str] = ()) -> list[Option]:
    """Return every way to checkpoint each region that may be and that holds enough to matter.

    For each region: everything recomputed, and nested sets of its expensive operators kept, those with
    the most seconds a byte first, which cover growing shares of the region's seconds. Operators that
    draw random numbers are never kept: those after them would draw others.

    Args:
        regions: The regions of a trace.
        costs: Seconds of the operators.
        excluded: FQNs to leave out.
    """
    trace = regions.trace
    refused = refusals(regions)
    seconds = np.array([costs.seconds_of(trace.signatures[op.signature]) for op in trace.ops])
    weights = repeats(trace)
    forward = sum(s.nbytes for s in trace.storages if s.category == "activations")
    mutated = {m for op in trace.ops for m in op.mutates}
    found: list[Option] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    for fqn, calls in regions.calls.items():
        extent = tuple((r.start, trace.calls[r.call].end) for r in calls)
        if not fqn or fqn in refused or fqn in excluded or extent in seen:
            continue
        if _droppable_bytes(regions, calls) < _LEAST_SHARE * forward:
            continue
        seen.add(extent)
        for keep in _keeps(regions, calls[0], seconds, mutated):
            kept = {r.call: regions.kept_ops(r, keep) for r in calls}
            found.append(Option(fqn, keep, kept, _added_seconds(regions, costs, calls, kept, seconds * weights)))
    return found


def _droppable_bytes(regions: Regions, calls: list[RegionCall]) -> int:
    storages = regions.trace.storages
    saves = regions.trace.saves
    born = {saves[s].storage for r in calls for s in r.saves if storages[saves[s].storage].birth >= r.start}
    return sum(storages[s].nbytes for s in born)


def _keeps(regions: Regions, region: RegionCall, seconds: npt.NDArray[np.float64], mutated: set[int]) -> list[Keep]:
    """Return the sets of operators to keep, the empty one first."""
    trace = regions.trace
    worth = []
    for op in range(region.start, region.cut):
        record, born = trace.ops[op], trace.births[op]
        nbytes = sum(trace.storages[s].nbytes for s in born)
        if record.name == _CAST and trace.precision != "32-true":
            continue  # autocast casts a weight that several modules share once, but again in each recomputation
        if nbytes and not record.random and not record.mutates and not mutated.intersection(born):
            worth.append((seconds[op] / nbytes, op))
    ranked = [op for _, op in sorted(worth, reverse=True)]
    total = float(sum(seconds[region.start : region.cut]))
    covered = list(itertools.accumulate(float(seconds[op]) for op in ranked))
    sizes = {next((i + 1 for i, c in enumerate(covered) if c >= share * total), 0) for share in _KEPT_SHARES}
    return [(), *(tuple(sorted(regions.op_key(region, op) for op in ranked[:n])) for n in sorted(sizes - {0}))]


def _added_seconds(
    regions: Regions,
    costs: CostTable,
    calls: list[RegionCall],
    kept: dict[int, set[int]],
    seconds: npt.NDArray[np.float64],
) -> float:
    again = sum(float(sum(seconds[op] for op in regions.rerun(r, kept[r.call]))) for r in calls)
    return again + sum(overhead_seconds(regions.trace, costs, r, bool(kept[r.call])) for r in calls)

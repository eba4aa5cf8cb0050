"""What tests ask in a process with fake CUDA: a search for several numbers of ranks, and the same by brute force."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

from memfit.errors import BudgetError
from memfit.foundations import Progress, read_budget
from memfit.hardware import find_device
from memfit.ir import FleetRow, Levers, allocations, replay, simulate
from memfit.planner import capture_each, costs_of, fleet_search
from memfit.ranks import SEARCHED, proposals, repeated_blocks, shard, with_samples, with_share_of_update
from memfit.workload import Workload, samples_of


class Checked(NamedTuple):
    """A row, what a step captured at its own size is predicted to hold and take, and the fastest by brute force."""

    row: FleetRow
    held_bytes: int
    step_seconds: float
    fastest_seconds: float


def mlp(samples: int = 64, width: int = 256) -> Workload:
    """Six blocks whose activations are worth recomputing, built without memory."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
        model = nn.Sequential(*blocks, nn.Linear(width, 10))
        batch = {"x": torch.empty(samples, 128, width), "y": torch.empty(samples, 128, 10)}
    return Workload(model, batch, loss, torch.optim.AdamW(model.parameters()), name="mlp")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def search(
    workload: Workload, devices: list[str], budget: str, world_sizes: list[int], **more: Any
) -> fleet_search.FleetSearch:
    options = options_of(devices, budget=read_budget(budget, of_plain=False), world_sizes=world_sizes, **more)
    return fleet_search.search(workload, options, lambda *_: None)


def options_of(devices: list[str], **more: Any) -> fleet_search.FleetRequest:
    """Return the options of a search for some cards."""
    given: dict[str, Any] = {"budget": read_budget("90%", of_plain=False), "world_sizes": [1]}
    given |= {"numerics": "reordered", "precisions": None, "each": True, "modes": SEARCHED, "steps": 1, "prices": {}}
    return fleet_search.FleetRequest(devices=[find_device(name) for name in devices], **(given | more))


def searched(
    workload: Workload, *, device: str, budgets: list[str], world_sizes: list[int], progress: object
) -> dict[str, list[Checked]]:
    """Return the rows of a search by budget, each held against captures of its own and against brute force."""
    found = {}
    for budget in budgets:
        rows = search(workload, [device], budget, world_sizes).rows
        found[budget] = [_checked(workload, row) for row in rows]
    return found


def grouped(workload: Workload, *, devices: list[str], progress: object) -> list[tuple[FleetRow, FleetRow]]:
    """Return the rows of cards searched together, each with that of the card alone."""
    options = {"budget": "90%", "world_sizes": [1, 4], "numerics": "reduced"}
    together = search(workload, devices, **options).rows
    alone = [row for name in devices for row in search(workload, [name], **options).rows]
    order = {name: place for place, name in enumerate(devices)}
    return list(zip(sorted(together, key=lambda row: order[row.device]), alone, strict=True))


def in_parts(
    workload: Workload, *, devices: list[str], budget: str, world_sizes: list[int], progress: object
) -> tuple[fleet_search.FleetSearch, list[fleet_search.FleetSearch]]:
    """Return a search for all cards and numbers of ranks, and one for each pair of them alone."""
    together = search(workload, devices, budget, world_sizes)
    pairs = [(name, ranks) for name in devices for ranks in world_sizes]
    return together, [search(workload, [name], budget, [ranks]) for name, ranks in pairs]


def _checked(workload: Workload, row: FleetRow) -> Checked:
    held_bytes, seconds = _predicted(workload, row, row.levers)
    fastest = math.inf
    for levers in _all(workload, row):
        held, took = _predicted(workload, row, levers)
        fastest = took if held <= row.budget_bytes and took < fastest else fastest
    return Checked(row, held_bytes, seconds, fastest)


def _all(workload: Workload, row: FleetRow) -> list[Levers]:
    """Return every size, sharding and number of whole blocks recomputed."""
    samples = -(-samples_of(workload) // row.ranks)
    sizes = [size for size in (samples, samples // 2, samples // 4) if size]
    units = tuple(str(index) for index in range(6))
    shardings: list[Any] = [None] if row.ranks == 1 else proposals(row.ranks, SEARCHED, units, 8)
    region = type(row.levers.regions[0]) if row.levers.regions else None
    counts = (0, 3, 6) if region else (0,)
    return [
        Levers(
            precision=row.levers.precision,
            microbatch_size=size,
            regions=tuple(region((units[index],)) for index in range(count)) if region else (),
            sharding=sharding and replace(sharding, reduces=reduces),
        )
        for size in sizes
        for sharding in shardings
        for reduces in (("each", "last") if sharding and size < samples else ("each",))
        for count in counts
    ]


_traces: dict[tuple[int, int, str], Any] = {}


def _predicted(workload: Workload, row: FleetRow, levers: Levers) -> tuple[int, float]:
    """Return what a step holds at most and its time: captured at its size, sharded, and simulated from the start."""
    device, samples = find_device(row.device), -(-samples_of(workload) // row.ranks)
    key = (samples, levers.microbatch_size, levers.precision)
    if key not in _traces:
        bare = Levers(precision=levers.precision, microbatch_size=levers.microbatch_size)
        _traces[key] = capture_each(with_samples(workload, samples), [bare], device)[0]
    trace = _traces[key]
    assert set(repeated_blocks(trace)) == {str(index) for index in range(6)}
    if levers.sharding is not None:
        trace = with_share_of_update(shard(trace, levers.sharding), levers.sharding)
    costs = costs_of([trace], device)
    report = replay(allocations(trace, costs, levers.regions), device.allocator, total_bytes=device.memory_bytes)
    held = int(report.peak_reserved_bytes * (1 + costs.peak_error) * (1 + trace.slack))
    return held, simulate(trace, costs, levers.regions).step_seconds


def found(
    workload: Workload,
    *,
    devices: list[str],
    budget: str,
    world_sizes: list[int],
    each: bool = True,
    progress: object,
) -> fleet_search.FleetSearch:
    """Return what one search finds."""
    return search(workload, devices, budget, world_sizes, each=each)


def counted(workload: Workload, *, steps: int, fails: bool, progress: Progress) -> int:
    """Return the steps that were counted, one by one; fail before the last on request."""
    for done in range(1, steps):
        progress("count", done, steps)
    if fails:
        raise BudgetError(f"steps={steps}")
    progress("count", steps, steps)
    return steps

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
from memfit.ir import FleetRow, Levers, Region, allocations, replay, simulate
from memfit.planner import FleetRequest, FleetSearch, capture_each, costs_of, search
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


def request(devices: list[str], budget: str = "90%", **more: Any) -> FleetRequest:
    """Return the options of a search for some cards."""
    given: dict[str, Any] = {"budget": read_budget(budget, of_plain=False), "world_sizes": [1]}
    given |= {"numerics": "reordered", "precisions": None, "each": True, "modes": SEARCHED, "steps": 1, "prices": {}}
    return FleetRequest(devices=[find_device(name) for name in devices], **(given | more))


def searched(workload: Workload, *, asked: list[dict[str, Any]], progress: object) -> list[FleetSearch]:
    """Return what is found with some options each, by themselves."""
    return [search(workload, request(**each), lambda *_: None) for each in asked]


def checked(workload: Workload, *, asked: list[dict[str, Any]], progress: object) -> list[list[Checked]]:
    """Return the rows of some searches, each held against captures of its own and against brute force."""
    found = searched(workload, asked=asked, progress=progress)
    return [[_checked(workload, row) for row in each.rows] for each in found]


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
    counts = (0, 3, 6) if row.levers.regions else (0,)
    return [
        Levers(
            precision=row.levers.precision,
            microbatch_size=size,
            regions=tuple(Region((unit,)) for unit in units[:count]),
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


def counted(workload: Workload, *, steps: int, fails: bool, progress: Progress) -> int:
    """Return the steps that were counted, one by one; fail before the last on request."""
    for done in range(1, steps):
        progress("count", done, steps)
    if fails:
        raise BudgetError(f"steps={steps}")
    progress("count", steps, steps)
    return steps

"""Layers whose inputs wait in host memory: lowest peaks that grow by weights alone."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest
import torch
from torch import nn

from memfit.ir import Regions, Trace, simulate
from memfit.solver import Ints, Problem, Solver, Tied, build, options, tied_problems
from memfit.solver import milp as module
from memfit.workload import Workload
from tests.models import COSTS, captured
from tests.solver.test_milp import legal
from tests.solver.test_problem import feasible, with_workspaces

HOST_BYTES = 2**40
ROWS = 4096


class Block(nn.Module):
    """Two residual halves, each of which a region may be."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(x)
        found: torch.Tensor = x + self.two(x)
        return found


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(32, 32), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


@functools.cache
def deep(layers: int) -> Trace:
    model = Deep(layers)
    workload = Workload(model, torch.zeros(ROWS, 32), loss, torch.optim.SGD(model.parameters(), lr=0.1))
    return captured(workload, microbatch_size=ROWS)


def problem_of(trace: Trace, host_bytes: int = HOST_BYTES) -> Problem:
    regions, costs = Regions(trace), msgspec.structs.replace(with_workspaces(trace), link_bytes_per_second=1e12)
    return build(regions, costs, options(regions, costs, offload=host_bytes > 0), host_bytes)


def test_a_choice_of_groups_is_the_choice_of_their_blocks() -> None:
    problem, rng, several = problem_of(deep(10)), random.Random(0), 0
    for tied in tied_problems(problem):
        for _ in range(8):
            x = feasible(tied.problem, rng)
            whole = tied.whole(x, len(problem.options))
            several += int(whole.sum() > x.sum() > 0)
            assert legal(problem, whole)
            assert problem.peak_bytes(whole) == tied.problem.peak_bytes(x)
            assert problem.seconds(whole) == pytest.approx(tied.problem.seconds(x))
            assert problem.host_bytes @ whole == tied.problem.host_bytes @ x
            assert set(problem.regions(whole)) == set(tied.problem.regions(x))
    assert several > 10


def resident_bytes(trace: Trace) -> int:
    """Return the bytes of weights, their gradients and optimizer states."""
    own = {"parameters", "gradients", "optimizer state"}
    return sum(s.nbytes for s in trace.storages if s.category in own and s.parameter >= 0)


def solved(tied: Tied, count: int) -> Ints:
    return tied.whole(Solver(tied.problem).leanest().x, count)


def test_with_inputs_in_host_memory_the_lowest_peak_of_more_layers_grows_by_their_weights_alone() -> None:
    """What a layer leaves beside them is the generator's state.

    One kind of option for all leaves inputs, where those with regions inside may not wait in host memory.
    """
    found: list[tuple[int, int]] = []
    for layers in (10, 16):
        trace = deep(layers)
        problem, resident = problem_of(trace), resident_bytes(trace)
        choice = solved(next(tied_problems(problem)), len(problem.options))
        regions, costs = problem.regions(choice), with_workspaces(trace)
        costs = msgspec.structs.replace(costs, link_bytes_per_second=1e12)
        assert simulate(trace, costs, regions).peak_bytes == problem.peak_bytes(choice)
        simple = [o for o in problem.options if len(o.regions) == 1 or not o.transfers]
        simpler = build(Regions(trace), costs, simple, HOST_BYTES)
        one_kind = min(map(simpler.peak_bytes, module.policies(simpler)))
        found.append((problem.peak_bytes(choice) - resident, one_kind - resident))
    grown, grown_by_one_kind = (b - a for a, b in zip(*found, strict=True))
    input_bytes = ROWS * 32 * 4
    assert grown < 6 * input_bytes / 10 < grown_by_one_kind


def test_layers_of_deep_models_may_have_regions_inside() -> None:
    """One of many layers holds little of the whole step, and all of them hold nearly everything."""
    nested = {o.modules for o in options(Regions(deep(28)), COSTS) if len(o.regions) > 1}
    assert {(f"blocks.{i}",) for i in range(28)} <= nested

"""Problems in which layers are treated alike: the same peaks and times, and lowest peaks that grow by weights alone."""

from __future__ import annotations

import functools
import random

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from memfit.ir import Regions, Trace, simulate
from memfit.solver import Problem, Solver, build, options, uniform
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


@pytest.mark.parametrize("host_bytes", [0, HOST_BYTES])
def test_each_choice_is_one_of_the_whole_problem(host_bytes: int) -> None:
    problem = problem_of(deep(6), host_bytes)
    found = uniform(problem)
    assert found is not None and len(found.problem.options) < len(problem.options) / 2
    rng, several = random.Random(0), 0
    for _ in range(25):
        x = feasible(found.problem, rng)
        whole = found.spread(x, len(problem.options))
        several += int(whole.sum() > x.sum() > 0)
        assert legal(problem, whole)
        assert problem.peak_bytes(whole) == found.problem.peak_bytes(x)
        assert problem.seconds(whole) == pytest.approx(found.problem.seconds(x))
        assert problem.host_bytes @ whole == found.problem.host_bytes @ x
        assert set(problem.regions(whole)) == set(found.problem.regions(x))
    assert several > 10


def test_layers_have_the_same_option() -> None:
    found = uniform(problem_of(deep(6), 0))
    assert found is not None
    blocks = {f"blocks.{i}" for i in range(6)}
    assert any(set(o.modules) | {m for r in o.regions for m in r.modules} == blocks for o in found.problem.options)
    assert not any(region.keep for option in found.problem.options for region in option.regions)


def test_few_modules_that_are_alike_are_left_as_they_are() -> None:
    trace, problem = deep(6), problem_of(deep(6), 0)
    few = [option for option in problem.options if option.is_whole and option.modules[0].startswith("blocks.0")]
    assert few and uniform(build(Regions(trace), COSTS, few)) is None
    assert uniform(build(Regions(trace), COSTS, [])) is None


def resident_bytes(trace: Trace) -> int:
    """Return the bytes of weights, their gradients and optimizer states."""
    own = {"parameters", "gradients", "optimizer state"}
    return sum(s.nbytes for s in trace.storages if s.category in own and s.parameter >= 0)


def test_with_inputs_in_host_memory_the_lowest_peak_of_more_layers_grows_by_their_weights_alone() -> None:
    """What a layer leaves beside them is the generator's state.

    One kind of option for all leaves inputs, where those with regions inside may not wait in host memory.
    """
    found: list[tuple[int, int]] = []
    for layers in (3, 9):
        trace = deep(layers)
        problem, resident = problem_of(trace), resident_bytes(trace)
        alike = uniform(problem)
        assert alike is not None
        choice = Solver(alike.problem).leanest()
        regions, costs = alike.problem.regions(choice.x), with_workspaces(trace)
        costs = msgspec.structs.replace(costs, link_bytes_per_second=1e12)
        assert simulate(trace, costs, regions).peak_bytes == choice.peak_bytes
        simple = [o for o in problem.options if len(o.regions) == 1 or not o.transfers]
        simpler = build(Regions(trace), costs, simple, HOST_BYTES)
        one_kind = min(map(simpler.peak_bytes, module.policies(simpler)))
        found.append((choice.peak_bytes - resident, one_kind - resident))
    grown, grown_by_one_kind = (b - a for a, b in zip(*found, strict=True))
    input_bytes = ROWS * 32 * 4
    assert grown < 6 * input_bytes / 10 < grown_by_one_kind


def test_the_lowest_peak_found_is_not_above_that_of_layers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_OPTIONS", 1)
    problem = problem_of(deep(6))
    alike = uniform(problem)
    assert alike is not None
    lowest = Solver(alike.problem).leanest()
    assert Solver(problem).leanest(0.01).peak_bytes <= lowest.peak_bytes


def test_layers_of_deep_models_may_have_regions_inside() -> None:
    """One of many layers holds little of the whole step, and all of them hold nearly everything."""
    nested = {o.modules for o in options(Regions(deep(28)), COSTS) if len(o.regions) > 1}
    assert {(f"blocks.{i}",) for i in range(28)} <= nested


def test_what_was_found_for_modules_alike_is_taken_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_OPTIONS", 1)
    problem = problem_of(deep(6))
    lowest = Solver(problem).leanest(0.05).peak_bytes
    budget = lowest + (problem.peak_bytes(np.zeros(len(problem.options), np.int64)) - lowest) // 4
    choice = Solver(problem).fastest(budget, 5e-3, 0.05)
    assert choice is not None and choice.peak_bytes <= budget
    assert choice.seconds == problem.seconds(choice.x)

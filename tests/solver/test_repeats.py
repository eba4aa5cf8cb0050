"""Problems in which equal blocks choose alike, against the whole problem and every choice of it."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest

from memfit.ir import Regions
from memfit.solver import Columns, Ints, Option, Problem, Solver, Tied, build, options, tied_problems
from memfit.solver import milp as module
from tests.models import captured, transformer
from tests.solver.test_problem import feasible, with_workspaces

BLOCKS = 8


@functools.cache
def problem_of(blocks: int, seed: int, most_of_block: int = 1000) -> Problem:
    """Return the problem of a transformer's step, with the first few options of each block."""
    trace = captured(transformer(layers=blocks, batch=8, tokens=64, dim=64, dropout=0.0))
    costs, regions = with_workspaces(trace, seed), Regions(trace)
    found = options(regions, costs)
    if most_of_block < 1000:
        found = [option for i in range(blocks) for option in of_block(found, i)[:most_of_block]]
    return build(regions, costs, found)


def of_block(found: list[Option], block: int) -> list[Option]:
    """Return the options that are one block as a whole, by what they keep: none of it first."""
    return [option for option in found if option.modules == (f"blocks.{block}",) and len(option.regions) == 1]


@pytest.mark.parametrize("blocks", [BLOCKS, 11])
def test_a_choice_of_groups_is_the_choice_of_their_blocks(blocks: int) -> None:
    problem, rng = problem_of(blocks, 0), random.Random(1)
    found = list(tied_problems(problem))
    assert len({len(tied.members) for tied in found}) > 1  # units of one block and of several
    for tied in found:
        assert len(tied.problem.options) < len(problem.options)
        for _ in range(15):
            x = feasible(tied.problem, rng)
            whole = tied.whole(x, len(problem.options))
            assert whole.sum() >= x.sum()
            assert all(sum(whole[j] for j in members) <= 1 for members in problem.conflicts)
            assert tied.problem.peak_bytes(x) == problem.peak_bytes(whole)
            assert tied.problem.seconds(x) == pytest.approx(problem.seconds(whole))
            assert set(tied.problem.regions(x)) == set(problem.regions(whole))


def every(problem: Problem) -> list[tuple[int, float]]:
    """Return the peak and seconds of every choice without conflicts: of one option of each block, or of none."""
    blocks = [sorted(members) for members in problem.conflicts] or [[j] for j in range(len(problem.options))]
    found = []
    for taken in itertools.product(*([-1, *members] for members in blocks)):
        x = np.zeros(len(problem.options), np.int64)
        x[[j for j in taken if j >= 0]] = 1
        found.append((problem.peak_bytes(x), problem.seconds(x)))
    return found


def fastest_alike(problem: Problem, budget: int) -> float:
    """Return the seconds of the fastest choice of the tied problems."""
    found = [Solver(tied.problem).fastest(budget) for tied in tied_problems(problem)]
    return min((choice.seconds for choice in found if choice is not None), default=np.inf)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most_of_block", [1, 2])
def test_groups_of_blocks_reach_the_optimum_of_all_blocks(seed: int, most_of_block: int) -> None:
    problem = problem_of(BLOCKS, seed, most_of_block)
    assert len(problem.options) == BLOCKS * most_of_block
    known = every(problem)
    assert len(known) == (most_of_block + 1) ** BLOCKS
    peaks = sorted({peak for peak, _ in known})
    for budget in peaks[:: max(1, len(peaks) // 10)]:
        best = min(seconds for peak, seconds in known if peak <= budget)
        alike = fastest_alike(problem, budget)
        # Of one option any number of blocks may take it. Of several, not every number of each can.
        assert best * (1 - 1e-9) <= alike <= best * (1 + (1e-9 if most_of_block == 1 else 0.01))


@pytest.mark.parametrize("seed", range(2))
def test_the_solver_of_a_large_problem_finds_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", 0)
    problem = problem_of(BLOCKS, seed, 2)
    known, solver = every(problem), Solver(problem)
    assert solver._tied
    lowest = min(peak for peak, _ in known)
    leanest = solver.leanest()
    assert leanest.peak_bytes == pytest.approx(lowest, rel=1e-3) and leanest.bound <= lowest
    for budget in np.linspace(lowest, max(peak for peak, _ in known), 6).astype(int).tolist():
        best = min(seconds for peak, seconds in known if peak <= budget)
        choice = solver.fastest(budget)
        assert choice is not None and choice.peak_bytes == problem.peak_bytes(choice.x) <= budget
        assert choice.bound <= best * (1 + 1e-9) and best * (1 - 1e-9) <= choice.seconds <= best * 1.002


def test_programs_that_begin_where_the_last_one_ended_have_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(BLOCKS, 0)
    lowest, plain = Solver(problem).leanest().peak_bytes, problem.peak_bytes(np.zeros(len(problem.options), np.int64))
    budgets = np.linspace(lowest, plain, 5).astype(int).tolist()
    anew = [Solver(problem).bound(budget) for budget in budgets]
    monkeypatch.setattr(module, "_LARGE", 0)
    solver = Solver(problem)
    assert [solver.bound(budget) for budget in budgets] == pytest.approx(anew)
    assert solver.bound(lowest // 2) is None
    assert Solver(problem).peak_floor_bytes <= lowest


def test_a_shallow_model_has_no_tied_problems() -> None:
    assert list(tied_problems(problem_of(BLOCKS - 1, 0))) == []
    assert list(tied_problems(problem_of(BLOCKS, 0))) != []


def test_blocks_choose_alike_only_where_they_have_the_same_option() -> None:
    problem = problem_of(BLOCKS, 0, 2)
    for tied in tied_problems(problem):
        assert all(len({problem.options[j].regions[0].keep for j in members}) == 1 for members in tied.members)


@pytest.mark.parametrize("seed", range(5))
def test_columns_against_a_matrix(seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.integers(-9, 9, (6, 30)) * 2**30 * (generator.random((6, 30)) < 0.3)
    columns = Columns.of_matrix(matrix)
    whole, parts = generator.integers(0, 2, 6), generator.random(6)
    assert np.array_equal(columns.total(whole), whole @ matrix) and columns.total(whole).dtype == np.int64
    assert columns.total(parts) == pytest.approx(parts @ matrix, abs=1.0)
    places = generator.integers(0, 30, 9)
    assert np.array_equal(columns.at(places), matrix[:, places])
    owners: Ints = np.array([0, 1, 0, -1, 1, 0])
    merged = np.stack([matrix[owners == i].sum(axis=0) for i in range(2)])
    assert np.array_equal(columns.merged(owners, 2).at(np.arange(30)), merged)
    lines = [{int(at): int(v) for at, v in enumerate(np.diff(line, prepend=0)) if v} | {30: 7} for line in matrix]
    assert np.array_equal(Columns.of_lines(lines, 30).at(places), matrix[:, places])


def test_a_tied_choice_takes_each_option_once() -> None:
    for tied in tied_problems(problem_of(BLOCKS, 0)):
        assert isinstance(tied, Tied)
        taken = [j for members in tied.members for j in members]
        assert len(taken) == len(set(taken))

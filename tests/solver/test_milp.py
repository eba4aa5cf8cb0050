"""The solver against every feasible choice of small problems, and programs against every solution."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import pytest

from memfit.ir import Precision, Regions
from memfit.solver import Choice, Ints, Problem, Solver, build, options
from memfit.solver import milp as module
from memfit.solver.milp import EXACT, MilpResult, Rows, minimized, policies
from tests.models import plain_trace
from tests.solver.test_problem import with_workspaces

SECONDS = 10.0


def program(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return costs, a matrix with few coefficients, and what its rows may sum up to."""
    generator = np.random.default_rng(seed)
    matrix = generator.integers(-4, 5, (4, 7)) * (generator.random((4, 7)) < 0.6)
    return generator.normal(size=7), matrix.astype(np.float64), generator.integers(-3, 5, 4).astype(np.float64)


def entries(matrix: np.ndarray) -> list[tuple[int, int, float]]:
    """Return a matrix as triples, in no order."""
    found = [(int(i), int(j), float(matrix[i, j])) for i, j in zip(*np.nonzero(matrix), strict=True)]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


@pytest.mark.parametrize("seed", range(40))
def test_programs_against_every_choice(seed: int) -> None:
    cost, matrix, upper = program(seed)
    choices = [np.array(bits, np.float64) for bits in itertools.product((0, 1), repeat=7)]
    fitting = [x for x in choices if (matrix @ x <= upper).all()]
    rows = Rows.of_entries(entries(matrix[:2]), upper[:2].tolist()) + Rows.of_matrix(matrix[2:], upper[2:])
    own = cost, rows, np.zeros(7), np.ones(7)
    found = minimized(*own, whole=np.ones(7, bool), time_limit_seconds=SECONDS)
    relaxed = minimized(*own, time_limit_seconds=SECONDS)
    if not fitting:
        assert found.status == "infeasible" and found.x is None
    else:
        assert found.status == "optimal" and found.x is not None
        assert (matrix @ np.round(found.x) <= upper).all()
        assert found.value == pytest.approx(min(float(cost @ x) for x in fitting)) == pytest.approx(found.bound)
    if relaxed.status == "infeasible":
        assert not fitting
        return
    assert relaxed.x is not None and relaxed.reduced is not None
    assert (matrix @ relaxed.x <= upper + 1e-6).all() and relaxed.bound == relaxed.value
    assert (relaxed.reduced >= 0).all() and (relaxed.reduced[relaxed.x > 1e-6] <= 1e-9).all()
    for x in fitting:  # fractions tell what other variables cost
        assert cost @ x >= relaxed.value + relaxed.reduced @ (x * (relaxed.x <= 1e-9)) - 1e-6


@pytest.mark.parametrize("whole", [None, np.ones(60, bool)])
def test_without_time_no_more_is_said_than_is_known(whole: np.ndarray | None) -> None:
    generator = np.random.default_rng(0)
    matrix, cost = generator.random((40, 60)), -generator.random(60)
    own = cost, Rows.of_matrix(matrix, matrix.sum(1) / 3), np.zeros(60), np.ones(60)
    in_time = minimized(*own, whole=whole, gap=0.5, time_limit_seconds=SECONDS)
    found = minimized(*own, whole=whole, time_limit_seconds=0.0)
    assert found.status == "stopped"
    assert found.bound <= in_time.value + 1e-9


SOLVED = """
import sys
from pathlib import Path
import numpy as np
from memfit.solver.milp import Rows, minimized

with np.load(sys.argv[1]) as held:
    rows = Rows(held["starts"], held["columns"].astype(np.int64), held["values"], held["row_upper"])
    program = held["cost"], rows, held["lower"], held["upper"]
    found = minimized(*program, whole=held["whole"], gap=0.005, time_limit_seconds=0.8)
    relaxed = minimized(*program, time_limit_seconds=10.0)
assert found.status in ("optimal", "stopped"), found
assert found.x is None or found.value >= relaxed.value - 1e-9, (found.value, relaxed.value)
"""


def test_a_program_whose_restart_has_no_end_keeps_its_time_limit_and_nothing_is_printed() -> None:
    """That of a plan of the demo: HiGHS 1.16 goes on for ever in `strengthenInequalities`, in a restart's presolve.

    In a process of its own, since no signal reaches Python meanwhile, and a banner comes once in each.
    """
    held = Path(__file__).with_name("endless_restart.npz")
    done = subprocess.run(
        [sys.executable, "-c", SOLVED, str(held)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MOST_OPTIONS = 11


def problem_of(name: str, precision: Precision = "32-true", microbatches: int = 1) -> Problem:
    """Return the problem of a whole trace, with workspaces."""
    trace = plain_trace(name, precision, microbatches, large=True)
    costs = with_workspaces(trace)
    return build(Regions(trace), costs, options(Regions(trace), costs))


def plain_peak(problem: Problem) -> int:
    return problem.peak_bytes(np.zeros(len(problem.options), np.int64))


@functools.cache
def small(name: str, seed: int) -> Problem:
    """Return a problem of a few options, with random seconds and workspaces."""
    trace = plain_trace(name, large=True)
    costs = with_workspaces(trace, seed)
    regions = Regions(trace)
    found = options(regions, costs)
    picked = np.random.default_rng(seed).permutation(len(found))[:MOST_OPTIONS]
    return build(regions, costs, [found[i] for i in sorted(picked)])


@functools.cache
def every(name: str, seed: int) -> tuple[tuple[int, float], ...]:
    """Return the peak and seconds of every choice without conflicts."""
    problem = small(name, seed)
    choices = (np.array(bits, np.int64) for bits in itertools.product((0, 1), repeat=len(problem.options)))
    return tuple((problem.peak_bytes(x), problem.seconds(x)) for x in choices if legal(problem, x))


def peaks_of(name: str, seed: int) -> list[int]:
    return sorted({peak for peak, _ in every(name, seed)})


def legal(problem: Problem, x: Ints) -> bool:
    return set(x.tolist()) <= {0, 1} and all(sum(x[j] for j in members) <= 1 for members in problem.conflicts)


def check(problem: Problem, choice: Choice) -> None:
    """Check that a choice is legal, and that its figures are those of its options."""
    assert legal(problem, choice.x)
    assert choice.peak_bytes == problem.peak_bytes(choice.x)
    assert choice.seconds == problem.seconds(choice.x)


CASES = [(name, seed) for name in ("transformer", "convnet", "unet", "twice") for seed in range(2)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_fastest_is_the_fastest_of_all(name: str, seed: int) -> None:
    problem = small(name, seed)
    solver = Solver(problem)
    peaks = peaks_of(name, seed)
    budgets = [peaks[0] - 1, peaks[0], *peaks[1 : -1 : max(1, len(peaks) // 6)], peaks[-1]]
    before = np.inf
    for budget in budgets:
        best = min((seconds for peak, seconds in every(name, seed) if peak <= budget), default=None)
        choice = solver.fastest(budget)
        if best is None:
            assert choice is None
            continue
        assert choice is not None
        check(problem, choice)
        assert choice.peak_bytes <= budget
        assert choice.seconds == pytest.approx(best, rel=2e-4)
        assert choice.bound <= best * (1 + 1e-9) and choice.bound <= choice.seconds
        assert choice.seconds <= before * (1 + 2e-4)
        assert choice.status == "optimal"
        before = choice.seconds
    roomy = solver.fastest(10**12)
    assert roomy is not None and not roomy.x.any() and roomy.seconds == problem.plain_seconds == roomy.bound


@pytest.mark.parametrize("tolerance", [EXACT, 0.05])
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_small_kernels_leave_the_bound_below_every_choice(
    name: str, seed: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST_KERNEL", 1)
    problem = small(name, seed)
    peaks = peaks_of(name, seed)
    for budget in (peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2]):
        best = min(seconds for peak, seconds in every(name, seed) if peak <= budget)
        choice = Solver(problem).fastest(budget, tolerance)
        assert choice is not None and choice.peak_bytes <= budget
        assert choice.bound <= best * (1 + 1e-9) and choice.seconds <= best * (1 + 2 * tolerance)


def test_the_last_search_takes_nothing_slower_than_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = peaks_of("unet", 0)
    budget = peaks[len(peaks) // 4]
    solver = Solver(small("unet", 0))
    leanest, known = solver.leanest(), solver.fastest(budget)
    assert known is not None and leanest.peak_bytes <= budget and leanest.seconds > 1.01 * known.seconds
    searches: list[int] = []

    def slow(_: Solver, kernel: Ints, *__: Any) -> Any:
        searches.append(len(kernel))
        return leanest.x, -np.inf

    monkeypatch.setattr(Solver, "_among", slow)
    again = solver.fastest(budget)
    assert searches and again is not None
    assert again.seconds == known.seconds and again.bound < again.seconds


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_leanest_is_the_leanest_of_all(name: str, seed: int) -> None:
    problem = small(name, seed)
    choice = Solver(problem).leanest()
    lowest = min(peak for peak, _ in every(name, seed))
    check(problem, choice)
    assert lowest <= choice.peak_bytes <= lowest + 2048
    assert choice.bound <= lowest
    assert choice.status == "optimal"
    assert 0 < Solver(problem).peak_floor_bytes <= lowest


def test_time_never_grows_with_the_budget() -> None:
    problem = problem_of("unet", "bf16-mixed", 2)
    solver = Solver(problem)
    low, high = solver.leanest().peak_bytes, plain_peak(problem)
    seconds = [c.seconds for b in np.linspace(low, high, 9) if (c := solver.fastest(int(b))) is not None]
    assert len(seconds) >= 8
    assert all(later <= earlier * (1 + 2e-4) for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] == problem.plain_seconds


@pytest.mark.parametrize("limit", [0.0, 1e-9, 0.02])
def test_a_short_time_limit_gives_a_legal_choice_or_none(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_SECONDS", limit)
    problem = problem_of("unet", "bf16-mixed", 2)
    solver = Solver(problem)
    plain = plain_peak(problem)
    for budget in (plain // 10, plain // 2, plain * 3 // 4, plain):
        choice = solver.fastest(budget, time_limit_seconds=limit)
        if choice is not None:
            check(problem, choice)
            assert choice.peak_bytes <= budget and choice.bound <= choice.seconds
    leanest = solver.leanest(limit)
    check(problem, leanest)
    assert leanest.bound <= leanest.peak_bytes


def test_on_a_busy_machine_the_solver_gets_longer_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def noted(*arguments: Any, time_limit_seconds: float, **others: Any) -> MilpResult:
        limits.append(time_limit_seconds)
        return minimized(*arguments, time_limit_seconds=time_limit_seconds, **others)

    monkeypatch.setattr(module, "minimized", noted)
    monkeypatch.setattr(module, "thread_time", lambda: perf_counter() / 3)  # a third of the machine
    problem = problem_of("transformer")
    assert Solver(problem).fastest(plain_peak(problem) * 3 // 4, time_limit_seconds=10.0) is not None
    assert limits and 10.0 < max(limits) <= 3.3 * 10.0  # the two clocks are read one after the other


def test_the_search_for_the_lowest_peak_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("transformer")
    now, late = 0.0, []

    def counted(*arguments: Any, **others: Any) -> MilpResult:
        nonlocal now
        found = minimized(*arguments, **others)
        if others["whole"] is not None:
            late.append(now > 0.0)
            now = 1e6  # the time is over once the first integer program is solved
        return found

    monkeypatch.setattr(module, "minimized", counted)
    monkeypatch.setattr(module, "thread_time", lambda: now)
    leanest = Solver(problem).leanest()
    check(problem, leanest)
    assert late == [False]
    now = 0.0
    monkeypatch.setattr(module, "thread_time", lambda: 0.0)
    assert Solver(problem).leanest().peak_bytes <= leanest.peak_bytes and len(late) > 2


def test_the_leanest_without_time_is_the_best_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("transformer")
    solver = Solver(problem)
    monkeypatch.setattr(module, "minimized", lambda *_, **__: MilpResult("stopped"))
    leanest = solver.leanest()
    check(problem, leanest)
    whole = {o.modules[0]: i for i, o in enumerate(problem.options) if o.is_whole}
    x = np.zeros(len(problem.options), np.int64)
    x[[i for fqn, i in whole.items() if re.fullmatch(r"blocks\.\d+", fqn)]] = 1
    states = 2 * 5056  # what the modules beside the blocks keep of the generator's state
    assert leanest.peak_bytes <= problem.peak_bytes(x) + states < plain_peak(problem)
    assert leanest.status == "feasible" and leanest.bound == 0
    within = solver.fastest(leanest.peak_bytes)
    assert within is not None and within.status == "feasible"
    check(problem, within)
    assert problem.plain_seconds == within.bound <= within.seconds and within.peak_bytes <= leanest.peak_bytes
    assert solver.fastest(leanest.peak_bytes - 1) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_host_s_budget_is_kept(seed: int) -> None:
    """The fastest and the leanest of every choice, where the host has no room for options, some, and enough."""
    trace = plain_trace("transformer", large=True)
    costs = msgspec.structs.replace(with_workspaces(trace, seed), link_bytes_per_second=1e12)
    regions = Regions(trace)
    blocks = [o for o in options(regions, costs, offload=True) if o.modules in (("blocks.0",), ("blocks.1",))]
    chosen = [o for o in blocks if o.transfers and len(o.regions[0].keep) in (0, 3)]
    found = [np.array(bits, np.int64) for bits in itertools.product((0, 1), repeat=len(chosen))]
    lowest = []
    for host in (0, min(o.host_bytes for o in chosen), 2**40):
        problem = build(regions, costs, chosen, host)
        fitting = [x for x in found if legal(problem, x) and int(problem.host_bytes @ x) <= host]
        peaks = [problem.peak_bytes(x) for x in fitting]
        budget = (problem.peak_bytes(0 * found[0]) + min(peaks)) // 2
        best = min(problem.seconds(x) for x, peak in zip(fitting, peaks, strict=True) if peak <= budget)
        solver = Solver(problem)
        choice, leanest = solver.fastest(budget), solver.leanest()
        assert choice is not None and choice.seconds == pytest.approx(best, rel=2e-4)
        assert leanest.peak_bytes <= min(peaks) * 1.003
        for one in (choice, leanest):
            check(problem, one)
            assert int(problem.host_bytes @ one.x) <= host
        lowest.append(min(peaks))
    assert lowest[0] > lowest[1] >= lowest[2]


def test_no_options_leave_the_plain_step() -> None:
    trace = plain_trace("twice")
    problem = build(Regions(trace), with_workspaces(trace), [])
    plain = plain_peak(problem)
    solver = Solver(problem)
    assert solver.leanest().peak_bytes == plain
    choice = solver.fastest(plain)
    assert choice is not None and choice.seconds == problem.plain_seconds
    assert solver.fastest(plain - 1) is None


def test_the_leanest_is_solved_again_where_there_is_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small("transformer", 0)
    solver = Solver(problem)
    with monkeypatch.context() as patch:
        patch.setattr(module, "minimized", lambda *_, **__: MilpResult("stopped"))
        assert solver.leanest(0.5).status == "feasible"
    assert solver.leanest(0.5).status == "feasible"  # no more time than before
    found = solver.leanest(5.0)
    assert found.status == "optimal"
    assert found.peak_bytes == min(peak for peak, _ in every("transformer", 0))


@pytest.mark.parametrize("name", ["transformer", "convnet", "unet"])
def test_policies_are_nothing_and_others_that_take_less(name: str) -> None:
    problem = problem_of(name)
    nothing, *others = policies(problem)
    assert not nothing.any() and others
    assert all(legal(problem, x) and x.any() for x in others)
    assert min(problem.peak_bytes(x) for x in others) < problem.peak_bytes(nothing)
    if name == "transformer":  # every block whole is one of them
        blocks = {o.modules[0] for o in problem.options if o.is_whole and re.fullmatch(r"blocks\.\d+", o.modules[0])}
        chosen = [[problem.options[j] for j in np.nonzero(x)[0]] for x in others]
        assert blocks and any({o.modules[0] for o in one} == blocks and all(o.is_whole for o in one) for one in chosen)

"""Programs solved by HiGHS, against every solution of small ones."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memfit.solver.milp import Rows, minimized

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
def test_whole_numbers_against_every_choice(seed: int) -> None:
    cost, matrix, upper = program(seed)
    choices = [np.array(bits, np.float64) for bits in itertools.product((0, 1), repeat=7)]
    fitting = [float(cost @ x) for x in choices if (matrix @ x <= upper).all()]
    rows = Rows.of_entries(entries(matrix[:2]), upper[:2].tolist()) + Rows.of_matrix(matrix[2:], upper[2:])
    whole = np.ones(7, bool)
    found = minimized(cost, rows, np.zeros(7), np.ones(7), whole=whole, time_limit_seconds=SECONDS)
    if not fitting:
        assert found.status == "infeasible" and found.x is None
        return
    assert found.status == "optimal" and found.x is not None
    assert (matrix @ np.round(found.x) <= upper).all()
    assert found.value == pytest.approx(min(fitting)) == pytest.approx(found.bound)


@pytest.mark.parametrize("seed", range(40))
def test_fractions_are_a_bound_and_tell_what_other_variables_cost(seed: int) -> None:
    cost, matrix, upper = program(seed)
    rows = Rows.of_matrix(matrix, upper)
    found = minimized(cost, rows, np.zeros(7), np.ones(7), time_limit_seconds=SECONDS)
    choices = [np.array(bits, np.float64) for bits in itertools.product((0, 1), repeat=7)]
    fitting = [x for x in choices if (matrix @ x <= upper + 1e-9).all()]
    if found.status == "infeasible":
        assert not fitting
        return
    assert found.x is not None and found.reduced is not None
    assert (matrix @ found.x <= upper + 1e-6).all() and found.bound == found.value
    assert (found.reduced >= 0).all() and (found.reduced[found.x > 1e-6] <= 1e-9).all()
    for x in fitting:
        assert cost @ x >= found.value + found.reduced @ (x * (found.x <= 1e-9)) - 1e-6


@pytest.mark.parametrize("whole", [None, np.ones(60, bool)])
def test_without_time_no_more_is_said_than_is_known(whole: np.ndarray | None) -> None:
    generator = np.random.default_rng(0)
    matrix, cost = generator.random((40, 60)), -generator.random(60)
    rows = Rows.of_matrix(matrix, matrix.sum(1) / 3)
    in_time = minimized(cost, rows, np.zeros(60), np.ones(60), whole=whole, gap=0.5, time_limit_seconds=SECONDS)
    found = minimized(cost, rows, np.zeros(60), np.ones(60), whole=whole, time_limit_seconds=0.0)
    assert found.status == "stopped"
    assert found.bound <= in_time.value + 1e-9


def test_rows_without_coefficients() -> None:
    none = Rows.of_entries([], [])
    assert len((none + Rows.of_matrix(np.eye(2), np.ones(2))).upper) == 2
    found = minimized(np.ones(2), none, np.zeros(2), np.ones(2), time_limit_seconds=SECONDS)
    assert found.status == "optimal" and found.value == 0
    assert Rows.of_entries([(1, 0, 2.0)], [1.0, 1.0]).starts.tolist() == [0, 0, 1]


def test_nothing_is_printed() -> None:
    """In a process of its own: a banner comes once in each."""
    code = (
        "import numpy as np; from memfit.solver.milp import Rows, minimized;"
        "rows = Rows.of_matrix(-np.ones((1, 2)), -np.ones(1));"
        "whole = np.ones(2, bool);"
        "[minimized(np.ones(2), rows, np.zeros(2), np.ones(2), whole=w, time_limit_seconds=9.0) for w in (None, whole)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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


def test_a_program_whose_restart_has_no_end_keeps_its_time_limit() -> None:
    """That of a plan of the demo: HiGHS 1.16 goes on for ever in `strengthenInequalities`, in a restart's presolve.

    In a process of its own, since no signal reaches Python meanwhile.
    """
    held = Path(__file__).with_name("endless_restart.npz")
    done = subprocess.run(
        [sys.executable, "-c", SOLVED, str(held)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr

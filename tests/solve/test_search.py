"""The search: its bookkeeping against the problem, and its choices against the budget."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from memfit.ir.remat import Regions
from memfit.solve.candidates import options
from memfit.solve.problem import Problem, build
from memfit.solve.search import Search, _State
from tests.models import BUILDERS, plain_trace
from tests.solve.test_milp import legal
from tests.solve.test_problem import with_workspaces


def problem_of(name: str) -> Problem:
    trace = plain_trace(name, large=True)
    costs = with_workspaces(trace)
    return build(Regions(trace), costs, options(Regions(trace), costs))


@pytest.mark.parametrize("name", BUILDERS)
def test_bytes_are_kept_up_to_date(name: str) -> None:
    problem = problem_of(name)
    state = _State(Search(problem), np.zeros(len(problem.options), np.int64))
    rng = random.Random(0)
    for step in range(60):
        before = state.x.copy()
        done = state.exchange(rng.randrange(len(problem.options)))
        assert legal(problem, state.x)
        if step % 3 == 0:
            state.undo(done)
            assert (state.x == before).all()
        assert state.peak_bytes() == int(problem.row_peaks(state.x).max())


@pytest.mark.parametrize("name", ["transformer", "convnet", "unet"])
def test_choices_fit_and_get_no_slower_with_time(name: str) -> None:
    problem = problem_of(name)
    search = Search(problem)
    plain, *others = search.policies
    assert plain[0] == int(problem.row_peaks(np.zeros(len(problem.options), np.int64)).max()) and others
    lowest = int(problem.row_peaks(search.leanest(time.monotonic() + 5)).max())
    assert lowest <= min(peak for peak, _, _ in search.policies) < plain[0]
    for budget in (lowest, (lowest + plain[0]) // 2, plain[0]):
        hasty, patient = (search.fastest(budget, time.monotonic() + seconds) for seconds in (0, 5))
        assert patient is not None and legal(problem, patient)
        assert int(problem.row_peaks(patient).max()) <= budget
        assert hasty is None or problem.seconds(patient) <= problem.seconds(hasty)
    assert search.fastest(1000, time.monotonic() + 1) is None

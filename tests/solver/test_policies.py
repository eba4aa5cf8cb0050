"""Where the solver starts: legal choices, and those of practitioners among them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from memfit.ir import Regions
from memfit.solver import Problem, build, options
from memfit.solver.milp import policies
from tests.models import plain_trace
from tests.solver.test_milp import legal
from tests.solver.test_problem import with_workspaces


def problem_of(name: str) -> Problem:
    trace = plain_trace(name, large=True)
    costs = with_workspaces(trace)
    return build(Regions(trace), costs, options(Regions(trace), costs))


@pytest.mark.parametrize("name", ["transformer", "convnet", "unet"])
def test_the_first_is_nothing_and_others_take_less(name: str) -> None:
    problem = problem_of(name)
    nothing, *others = policies(problem)
    assert not nothing.any() and others
    assert all(legal(problem, x) and x.any() for x in others)
    assert min(problem.peak_bytes(x) for x in others) < problem.peak_bytes(nothing)


def test_every_block_whole_is_one_of_them() -> None:
    problem = problem_of("transformer")
    blocks = {o.modules[0] for o in problem.options if o.is_whole and re.fullmatch(r"blocks\.\d+", o.modules[0])}
    chosen = [[problem.options[j] for j in np.nonzero(x)[0]] for x in policies(problem)]
    assert blocks and any({o.modules[0] for o in one} == blocks and all(o.is_whole for o in one) for one in chosen)

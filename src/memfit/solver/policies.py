"""Start choices for the solver: the same kind of option for all modules, as practitioners choose them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from memfit.solver.highs import Ints
from memfit.solver.problem import Problem


def policies(problem: Problem) -> list[Ints]:
    """Return the empty choice, and a choice for each kind of option that several modules have.

    A kind is a module with a set of kept operators, a run of a number of modules, or a module with inner regions.
    """
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for j, option in enumerate(problem.options):
        names = tuple(re.sub(r"\d+", "#", fqn) for fqn in option.modules)
        kinds[names, option.regions[0].keep, option.regions[0].offload, len(option.regions)].append(j)
    repeated = [members for members in kinds.values() if len(members) > 1]
    return [np.zeros(len(problem.options), np.int64), *(_all_of(members, problem) for members in repeated)]


def _all_of(members: Iterable[int], problem: Problem) -> Ints:
    x = np.zeros(len(problem.options), np.int64)
    for j in members:
        if not any(x[sorted(conflict)].any() for conflict in problem.conflicts if j in conflict):
            x[j] = 1
    return x

"""Plans that solve for less long than users' do: tests ask for many, of steps that are solved in an instant."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from unittest import mock

from memfit.pipeline import fit, plan
from memfit.solver import milp

TIME_LIMIT_SECONDS = 0.5
ROUND_SECONDS = 0.02
"""The least time of each round of a search within a budget, also once its time is over; users have 0.1 seconds."""


@contextlib.contextmanager
def quick_plans() -> Iterator[None]:
    """Take these limits where a test names none."""
    with contextlib.ExitStack() as stack:
        for verb in (plan, fit):
            defaults = inspect.unwrap(verb).__kwdefaults__
            assert defaults is not None
            stack.enter_context(mock.patch.dict(defaults, time_limit_seconds=TIME_LIMIT_SECONDS))
        stack.enter_context(mock.patch.object(milp, "_LEAST_SECONDS", ROUND_SECONDS))
        yield

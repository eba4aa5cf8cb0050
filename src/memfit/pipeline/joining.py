"""The ranks that a verb runs on: those that this process has joined, or that a launcher has started with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import distributed

from memfit.ir import codec
from memfit.ir.plan import Plan
from memfit.pipeline.placement import kind_of, place_of
from memfit.ranks.environment import check_shared, launched_size
from memfit.ranks.one_process import SingleProcess
from memfit.ranks.together import check_same
from memfit.workload import Workload


def ranks_here() -> SingleProcess:
    """Return the ranks of the process group that this process has joined; a single process where it has joined none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return SingleProcess()
    from memfit.ranks.group import Group  # distributed packages take a second to import

    return Group("cpu")  # what it sends are objects, which go where the backend asks for


def check_launched(plan: Plan) -> None:
    """Check that a launcher has not started several processes for a plan of one.

    Raises:
        UsageError: It has.
    """
    if plan.levers.sharding is None:
        remedy = f"start one process, without torchrun, or make a plan with world_size={launched_size()}"
        check_shared(1, "the plan", remedy)


@contextlib.contextmanager
def ranks_of(plan: Plan) -> Iterator[SingleProcess]:
    """Be one of the ranks that a plan is for, until the context is left.

    Raises:
        UsageError: There are more or fewer ranks.
        PlanMismatchError: The ranks have different plans.
    """
    check_launched(plan)
    if plan.levers.sharding is None:
        yield SingleProcess()
        return
    from memfit.ranks.launch import joined  # distributed packages take a second to import
    from memfit.ranks.mesh import check_size

    with joined(kind_of(plan)) as ranks:
        check_size(plan.levers.sharding, ranks.size)
        check_same(ranks, "plans", codec.encode(plan))
        yield ranks


@contextlib.contextmanager
def joined_by(workload: Workload) -> Iterator[None]:
    """Be one of the ranks that a launcher has started, if it has started several, until the context is left."""
    if launched_size() == 1:
        yield
        return
    from memfit.ranks.launch import joined  # distributed packages take a second to import

    kind = place_of(workload).type
    with joined("cpu" if kind == "meta" else kind):
        yield

"""From one plan to a lower one, while a step stays the same object."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from msgspec.structs import replace
from torch import nn

from memfit.foundations import format_bytes
from memfit.ir import Candidate, Levers, Plan, allows, at_point
from memfit.levers import registry
from memfit.levers.lever import LeversOn
from memfit.levers.microbatches import microbatch_size_of
from memfit.recomputation import checking
from memfit.training import Step
from memfit.workload import samples_of


@contextlib.contextmanager
def switched(model: nn.Module, levers: Levers) -> Iterator[None]:
    """Put on a model the levers that may change between two steps, until the context is left."""
    with contextlib.ExitStack() as stack:
        for lever in registry.used_whole(levers):
            if lever.switches(levers):
                stack.enter_context(lever.on_model(levers, model))
        yield


def without_switched(levers: Levers, batch_size: int) -> Levers:
    """Return levers without those that `switched` puts on a model; the batch is cut as before."""
    bare = levers
    for lever in registry.LEVERS:
        if lever.switches(levers):
            bare = lever.without(LeversOn(bare, batch_size))
    return replace(bare, microbatch_size=levers.microbatch_size)


class Switch:
    """Puts a step under the levers that `switched` knows, cuts its batches, and can do so otherwise between two steps.

    Args:
        step: The step, to whose model none of these is applied.
        levers: What it begins with. The precision is not switched.
        is_proven: Whether what these recompute was held against the step before. The first step under levers of which
            it was not does so, by checksums (`memfit.recomputation.probe.checking`).

    Raises:
        PlanError: The regions are not legal.
    """

    def __init__(self, step: Step, levers: Levers, *, is_proven: bool = False) -> None:
        self.step = step
        self._proven = {levers} if is_proven else set[Levers]()
        self._stack = contextlib.ExitStack()
        self.levers = without_switched(levers, samples_of(self.step.workload))
        self.to(levers)

    def to(self, levers: Levers) -> None:
        """Put the step under other levers."""
        if replace(levers, microbatch_size=1) != replace(self.levers, microbatch_size=1):
            self._stack.close()
            self._stack.enter_context(switched(self.step.workload.model, levers))
        self.levers = levers
        needs_proof = registry.recomputes(levers) and levers not in self._proven
        proving = functools.partial(self._proving, levers) if needs_proof else None
        self.step.change(microbatch_size=microbatch_size_of(levers, self.step.workload), proving=proving)

    @contextlib.contextmanager
    def _proving(self, levers: Levers) -> Iterator[None]:
        """Hold what is recomputed against what was computed before; where all is the same, do so no more."""
        with checking():
            yield
        self._proven.add(levers)
        if self.levers == levers:
            self.step.change(proving=None)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave model and optimizer as the user made them, until the context is left; not weights that are in bf16."""
        levers = self.levers
        self.to(without_switched(levers, samples_of(self.step.workload)))
        try:
            with contextlib.ExitStack() as stack:
                for lever in registry.LEVERS:
                    stack.enter_context(lever.lifted(self.step.workload))
                yield
        finally:
            self.to(levers)

    def lower(self, plan: Plan) -> Plan | None:
        """Put the step under the plan after one on its frontier, and return that; None where there is none."""
        candidates = lower_candidates(plan)
        if not candidates:
            return None
        found = lowered(plan, candidates[0])
        self.to(found.levers)
        self.step.change(predicted_peak_bytes=found.predicted.peak_bytes, prediction=found.predicted)
        return found

    def close(self) -> None:
        """Undo what was done to the model."""
        self._stack.close()


def candidates_of(plan: Plan) -> list[Candidate]:
    """Return the points of a plan's frontier that may take its place while it trains, those of most memory first.

    Their levers that a training keeps, as its precision and its optimizer, are the plan's, and their numerics class is
    one that the user allowed.
    """

    on = LeversOn(plan.levers, plan.batch_size)

    def may_follow(point: Candidate) -> bool:
        return all(lever.may_switch(on, point.levers) for lever in registry.LEVERS)

    points = [c for c in plan.frontier if allows(plan.allowed, c.numerics) and may_follow(c)]
    return sorted(points, key=lambda c: -c.peak_bytes)


def lower_candidates(plan: Plan) -> list[Candidate]:
    """Return the candidates that take less memory than the plan, the one next to it first."""
    own = next((c.peak_bytes for c in plan.frontier if c.levers == plan.levers), plan.predicted.peak_bytes)
    return [c for c in candidates_of(plan) if c.peak_bytes < own]


def lowered(plan: Plan, candidate: Candidate) -> Plan:
    """Return the plan that runs a point of a plan's frontier. What it predicts is the solver's prediction."""
    note = (
        f"from the frontier of the plan of {format_bytes(plan.predicted.peak_bytes)}, after that plan ran out of memory"
    )
    return at_point(plan, candidate, note)

"""From one plan to a lower one, while a step stays the same object."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from msgspec.structs import replace
from torch import nn

from memfit.apply.checkpoint import checkpointed
from memfit.apply.chunked_loss import chunked
from memfit.apply.lean import lean
from memfit.apply.precision import uncast
from memfit.apply.probe import checking
from memfit.ir.plan import NUMERICS, Candidate, Levers, Plan, Prediction, Solution, recomputes
from memfit.pipeline.classes import lever_classes
from memfit.train.step import Step
from memfit.units import format_bytes


@contextlib.contextmanager
def switched(model: nn.Module, levers: Levers) -> Iterator[None]:
    """Put on a model those of the levers that can be others from one step to the next, until the context is left."""
    with chunked(model, levers.chunked_loss), lean(model, levers.lean), checkpointed(model, levers.regions):
        yield


def without_switched(levers: Levers) -> Levers:
    """Return levers without those that `switched` puts on a model."""
    return replace(levers, chunked_loss=None, lean=(), regions=())


class Switch:
    """Puts a step under the levers that `switched` knows, cuts its batches, and can do so otherwise between two steps.

    Args:
        step: The step, to whose model none of these is applied.
        levers: What it begins with. The precision is not switched.
        is_proven: Whether what these recompute was held against the step before. The first step under levers of which
            it was not does so, by checksums (`memfit.apply.probe.checking`).

    Raises:
        PlanError: The regions are not legal.
    """

    def __init__(self, step: Step, levers: Levers, *, is_proven: bool = False) -> None:
        self.step = step
        self._proven = {levers} if is_proven else set[Levers]()
        self._stack = contextlib.ExitStack()
        self.levers = without_switched(levers)
        self.to(levers)

    def to(self, levers: Levers) -> None:
        """Put the step under other levers."""
        if replace(levers, microbatch_size=1) != replace(self.levers, microbatch_size=1):
            self._stack.close()
            self._stack.enter_context(switched(self.step.workload.model, levers))
        self.step.microbatch_size = levers.microbatch_size
        self.levers = levers
        needs_proof = recomputes(levers) and levers not in self._proven
        self.step.proving = functools.partial(self._proving, levers) if needs_proof else None

    @contextlib.contextmanager
    def _proving(self, levers: Levers) -> Iterator[None]:
        """Hold what is recomputed against what was computed before; where all is the same, do so no more."""
        with checking():
            yield
        self._proven.add(levers)
        if self.levers == levers:
            self.step.proving = None

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave the model's modules as the user made them, until the context is left; not weights that are in bf16."""
        levers = self.levers
        self.to(without_switched(levers))
        try:
            with uncast(self.step.workload.model):
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
        self.step.predicted_peak_bytes = found.predicted.peak_bytes
        self.step.prediction = found.predicted
        return found

    def close(self) -> None:
        """Undo what was done to the model."""
        self._stack.close()


def candidates_of(plan: Plan) -> list[Candidate]:
    """Return the points of a plan's frontier that may take its place while it trains, those of most memory first.

    They are of its precision and its optimizer, which a training keeps, and of a numerics class that the user
    allowed. With weights in bf16 gradients are accumulated or not as in the plan, which decides where they are.
    """
    allowed = NUMERICS[: NUMERICS.index(plan.allowed) + 1]
    kept = (plan.levers.precision, plan.levers.optimizer)
    found = [c for c in plan.frontier if c.numerics in allowed and (c.levers.precision, c.levers.optimizer) == kept]
    if plan.levers.precision == "bf16-true":
        accumulates = plan.levers.microbatch_size < plan.batch_size
        found = [c for c in found if (c.levers.microbatch_size < plan.batch_size) == accumulates]
    return sorted(found, key=lambda c: -c.peak_bytes)


def lower_candidates(plan: Plan) -> list[Candidate]:
    """Return those that take less memory than the plan, the one next to it first."""
    own = next((c.peak_bytes for c in plan.frontier if c.levers == plan.levers), plan.predicted.peak_bytes)
    return [c for c in candidates_of(plan) if c.peak_bytes < own]


def lowered(plan: Plan, candidate: Candidate) -> Plan:
    """Return the plan that runs a point of a plan's frontier. What it predicts is the solver's prediction."""
    upper = plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes
    predicted = replace(
        plan.predicted,
        peak_bytes=candidate.peak_bytes,
        peak_upper_bytes=candidate.peak_upper_bytes or int(candidate.peak_bytes * upper),
        peak_reserved_bytes=None,
        step_seconds=candidate.step_seconds,
        by_category={},
        where="",
        throughput=None,
    )
    note = f"taken from the frontier of the plan for {format_bytes(plan.predicted.peak_bytes)}, which ran out of memory"
    return at_point(plan, candidate, predicted, note)


def at_point(plan: Plan, candidate: Candidate, predicted: Prediction, note: str) -> Plan:
    """Return the plan that runs a point of a plan's frontier."""
    bound = min(predicted.step_seconds, *(c.bound_seconds for c in plan.frontier))
    couples_batch = candidate.numerics == "changed" and candidate.levers.optimizer != "adafactor"
    solution = Solution(
        status="feasible",
        bound_seconds=bound,
        gap=1 - bound / predicted.step_seconds,
        solve_seconds=plan.solution.solve_seconds,
    )
    return replace(
        plan,
        levers=candidate.levers,
        numerics=candidate.numerics,
        classes=lever_classes(candidate.levers, plan.batch_size, couples_batch),
        predicted=predicted,
        solution=solution,
        notes=[*plan.notes, note],
    )

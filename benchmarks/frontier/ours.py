"""memfit: a plan for each budget, applied."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from torch import nn

import memfit
from benchmarks.frontier.methods import LOWEST, OURS, Apply, Method, Prepared, Task, Unsupported
from memfit import InfeasibleError, Plan
from memfit.ir.plan import uses_text
from memfit.planner.verb_options import Measure
from memfit.training.step import Step
from memfit.units import format_bytes
from memfit.workload import Loss, Workload


def _settings(task: Task) -> list[float | str]:
    return [LOWEST, *task.shares]


def plan_for(
    task: Task,
    share: float | str,
    numerics: Any = "exact",
    compile: bool | Literal["auto"] = False,
    measure: Measure = "auto",
) -> Plan:
    """Return the plan for a share of the plain peak, or of the lowest peak that memfit finds.

    Raises:
        InfeasibleError: No plan fits.
    """

    def planned(budget: int | str) -> Plan:
        return memfit.plan(
            task.workload,
            budget=budget,
            device=task.device,
            numerics=numerics,
            precisions=("32-true",),
            points=1,
            compile=compile,
            measure=measure,
            optimizers=(),  # gradients are compared, which an update within the backward pass frees
        )

    if share != LOWEST:
        return planned(task.budget_bytes(float(share)))
    try:
        return planned("1B")
    except InfeasibleError as e:
        return planned(e.lowest_peak_bytes)


def _make(task: Task, lowest: list[int], share: float | str) -> Prepared:
    plan = _planned(task, lowest, share)
    return Prepared(lambda workload: memfit.apply(plan, workload), facts(plan))


def _make_one(compile: bool | Literal["auto"], task: Task, lowest: list[int], share: float | str) -> Prepared:
    plan = _planned(task, lowest, share, numerics="reordered", compile=compile)

    def apply(workload: Workload) -> Step:
        return memfit.apply(plan, workload)

    if plan.levers.compiler == "none":
        return Prepared(apply, facts(plan))
    return Prepared(compiled_once(apply), facts(plan), sort="compiled")


def compiled_once(apply: Apply) -> Apply:
    """Return how to run a plan's compiled step with the code of its first run: each application would make it anew."""
    made: dict[nn.Module, Callable[..., Loss]] = {}

    @contextlib.contextmanager
    def applied(workload: Workload) -> Iterator[Step]:
        with apply(workload) as step:
            loss_fn = made.setdefault(workload.model, step.workload.loss_fn)
            step.workload = dataclasses.replace(step.workload, loss_fn=loss_fn)
            yield step

    return applied


def _planned(task: Task, lowest: list[int], share: float | str, **searched: Any) -> Plan:
    """Plan for a budget; what is below the lowest peak found is not searched again."""
    if share != LOWEST and lowest and task.budget_bytes(float(share)) < lowest[0]:
        raise Unsupported(f"no plan fits: the lowest peak that memfit finds is {format_bytes(lowest[0])}")
    plan = plan_for(task, share, **searched)
    if share == LOWEST:
        lowest.append(plan.budget_bytes)
    return plan


def facts(plan: Plan) -> dict[str, Any]:
    """Return what a plan says."""
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        **({"predicted_reserved_bytes": reserved} if (reserved := plan.predicted.peak_reserved_bytes) else {}),
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_ratio": plan.predicted.step_seconds / plan.plain.step_seconds,
        "status": plan.solution.status,
        "gap": plan.solution.gap,
        "solve_seconds": plan.solution.solve_seconds,
        "microbatch_size": plan.levers.microbatch_size,
        "regions": len(plan.levers.regions),
        "compiler": plan.levers.compiler,
        "optimizer": plan.levers.optimizer,
        "chunked_loss_rows": None if plan.levers.chunked_loss is None else plan.levers.chunked_loss.rows,
        "levers": uses_text(plan.uses),
        "predicted_and_measured_seconds": [
            [uses_text(step.uses), step.predicted_seconds, step.measured_seconds] for step in plan.measured
        ],
    }


EAGER = (Method(OURS, "eager", _settings, _make, lambda task: []),)
COMPILED = (Method(OURS, "compiled", _settings, partial(_make_one, True), lambda task: []),)
ONE_PLAN = (Method(OURS, "all", _settings, partial(_make_one, "auto"), lambda task: []),)
"""One plan for each budget, which chooses by itself whether the step is compiled."""

"""What a training runs under: how its plan is made, as a user would, and what is done to the workload before."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

import memfit
from memfit import InfeasibleError, LossScaling, Plan, Workload
from memfit.ir import Levers, OptimizerLever, Precision
from memfit.workload import fingerprint, samples_of

EXACT_SHARE = 0.7
"""The budget of exact plans, as a share of the plain peak; the lowest peak there is, where that is more."""

Prepare = Callable[[Workload], Workload]
MakePlan = Callable[[Workload], Plan]


@dataclass(frozen=True)
class Condition:
    """A way to run a training.

    Attributes:
        plan: Makes the plan; None for the plain step, `memfit.Step`.
        prepare: Says in the workload what the plan needs.
        hurts: Why it is here though nobody should use it; "" for others.
    """

    title: str
    plan: MakePlan | None = None
    prepare: Prepare = lambda workload: workload
    hurts: str = ""


def exact(workload: Workload) -> Plan:
    """Return the exact plan for `EXACT_SHARE` of the plain peak."""
    options: dict[str, Any] = {"numerics": "exact", "precisions": ["32-true"], "points": 1, "measure": False}
    try:
        return memfit.plan(workload, budget=f"{EXACT_SHARE}x", **options)
    except InfeasibleError as e:
        return memfit.plan(workload, budget=e.lowest_peak_bytes, **options)


def single(precision: Precision = "32-true", optimizer: OptimizerLever = "as-is", microbatches: int = 1) -> MakePlan:
    """Return what makes a plan of one lever: a plan without need, changed as one changes the file by hand."""

    def make(workload: Workload) -> Plan:
        plan, size = _without_need(workload), -(-samples_of(workload) // microbatches)
        levers = Levers(precision=precision, microbatch_size=size, optimizer=optimizer)
        return replace(plan, levers=levers, allowed="changed")

    return make


_made: dict[str, Plan] = {}


def _without_need(workload: Workload) -> Plan:
    """Return a plan for more memory than there is need of."""
    key = fingerprint(workload)
    if key not in _made:
        _made[key] = memfit.plan(
            workload, budget="100GiB", numerics="exact", precisions=["32-true"], optimizers=(), points=1, measure=False
        )
    return _made[key]


def saying(**said: Any) -> Prepare:
    """Return what sets fields of the workload."""
    return lambda workload: dataclasses.replace(workload, **said)


def bf16_alone(workload: Workload) -> Workload:
    """Return a workload whose model is bf16 by hand, as `model.bfloat16()` makes it: nothing keeps small updates."""
    model = workload.model.bfloat16()

    def narrow(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.bfloat16() if torch.is_floating_point(a) else a for a in args)

    model.register_forward_pre_hook(narrow)
    model.register_forward_hook(lambda _, __, out: out.float())
    return workload


CONDITIONS = {
    "plain": Condition("plain, fp32"),
    "exact": Condition("exact plan", exact),
    "microbatches": Condition("4 microbatches", single(microbatches=4)),
    "bf16-mixed": Condition("bf16-mixed", single("bf16-mixed")),
    "16-mixed": Condition("16-mixed, dynamic loss scaling", single("16-mixed")),
    "bf16-master": Condition("bf16-true, master weights", single("bf16-true"), saying(bf16_updates="master-weights")),
    "bf16-stochastic": Condition(
        "bf16-true, stochastic rounding", single("bf16-true"), saying(bf16_updates="stochastic-rounding")
    ),
    "adamw-8bit": Condition("AdamW with 8-bit states", single(optimizer="adamw-8bit")),
    "adafactor": Condition("Adafactor at its own rate", single(optimizer="adafactor")),
    "bf16-alone": Condition(
        "bf16 by hand, no help", single(), bf16_alone, "bf16 weights lose small updates; memfit refuses to plan it"
    ),
    "16-mixed-high": Condition(
        "16-mixed, scale from 2^40",
        single("16-mixed"),
        saying(loss_scaling=LossScaling(initial=2.0**40, ceiling=2.0**40)),
        "updates are skipped until the scale is low enough",
    ),
}


def plan_of(condition: Condition, workload: Workload) -> Plan | None:
    """Return the plan of a condition for a workload that is prepared; None for the plain step."""
    return None if condition.plan is None else condition.plan(workload)


def step_of(plan: Plan | None, workload: Workload) -> contextlib.AbstractContextManager[memfit.Step]:
    """Return the context of the training step."""
    return memfit.Step(workload) if plan is None else memfit.apply(plan, workload)


def describe(plan: Plan | None) -> list[str]:
    """Return the levers of a plan that memfit chose, in a few words each."""
    return [] if plan is None else [use.brief for use in plan.uses]

"""Are the samples of a batch coupled, by the model or by the loss? Then microbatches would be another training.

Normalisations over the batch are seen in the program. A contrastive loss, a Dice over all samples, or a mean over
something else than the samples is a program like any other: what gives it away are its numbers. So the loss of a few
real samples together is held against that of them in two parts, put together as a step does it.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from msgspec.structs import replace

from memfit.capture import nothing_changes
from memfit.errors import PlanError
from memfit.ir import Levers, Numerics, Plan, Trace
from memfit.levers import OF_BATCH_NORM, OF_COUPLING_LOSS, OF_GRADIENT_HOOKS, has_gradient_hooks
from memfit.training import evaluation_mode
from memfit.workload import Workload, has_data, part_of, rng_state, samples_of, take

_SAMPLES = 8  # that are looked at, at most
_TOLERANCE, _TOLERANCE_ELSEWHERE = 1e-4, 1e-2
"""Relative differences that may be rounding: on the CPU, and where kernels may change with the batch's size."""


def coupling(trace: Trace, workload: Workload) -> str | None:
    """Return a note on what couples the samples of a batch; None where nothing is seen to, or nothing can be cut."""
    if samples_of(workload) < 2:
        return None
    if any(module.couples_batch for module in trace.modules):
        row = OF_BATCH_NORM
    elif any(map(has_gradient_hooks, workload.model.parameters())):
        row = OF_GRADIENT_HOOKS
    else:
        found = coupled_samples(workload)
        return None if found is None else _note(found)
    return f"microbatches are left out ({row.other}): {row.why}; {row.instead}"


def coupled_samples(workload: Workload) -> str | None:
    """Return what shows that the samples of a batch are coupled by the loss; None where nothing does.

    Two forward passes over a few samples of the workload's batch, in evaluation mode and fp32. Nothing is said where
    there is no data, where the loss draws random numbers, or where it can't be computed like this.
    """
    size = samples_of(workload)
    samples = min(_SAMPLES, size)
    is_wide = all(p.itemsize >= 4 for p in workload.model.parameters())
    if samples < 2 or not (is_wide and has_data(workload)):
        return None
    try:
        with nothing_changes(workload):
            whole, together = _losses(workload, samples)
            if whole == together == 0 and samples < size:  # as of a contrastive loss where no two of them are alike
                samples = size
                whole, together = _losses(workload, samples)
    except Exception:  # someone's loss in evaluation mode, on other samples than it is made for
        return None
    is_elsewhere = next((p.device.type for p in workload.model.parameters()), "cpu") != "cpu"
    tolerance = _TOLERANCE_ELSEWHERE if is_elsewhere else _TOLERANCE
    if not math.isfinite(whole) or abs(whole - together) <= tolerance * max(abs(whole), abs(together)):
        return None
    return f"the loss of {samples} samples is {whole:.5g} at once, and {together:.5g} in two parts"


def _losses(workload: Workload, samples: int) -> tuple[float, float]:
    """Return the loss of some samples together, and of them in two parts of unequal size."""
    cut = max(1, samples // 2 - 1)
    size = samples_of(workload)
    if workload.split is not None:  # the user cuts the batch: the first samples
        batch = part_of(workload, workload.batch, 0, samples)
    else:  # samples from all over it
        batch = take(workload.batch, [round(i * (size - 1) / (samples - 1)) for i in range(samples)])
    parameters = {id(p): p for p in workload.model.parameters()}
    model = copy.deepcopy(workload.model, parameters)  # all else that a model has, it may change

    def value(start: int, stop: int) -> tuple[float, float | None]:  # the loss and its count, None where it is a mean
        found: Any = workload.loss_fn(model, part_of(workload, batch, start, stop))
        return (float(found[0]), float(found[1])) if isinstance(found, tuple) else (float(found), None)

    with evaluation_mode(model):
        before = rng_state()
        whole, *parts = value(0, samples), value(0, cut), value(cut, samples)
        if rng_state() != before:
            raise ValueError("the loss draws random numbers")
    if whole[1] is None:
        return whole[0], sum(loss * n / samples for (loss, _), n in zip(parts, (cut, samples - cut), strict=True))
    return whole[0] / whole[1], sum(loss for loss, _ in parts) / sum(count or 0.0 for _, count in parts)


def without_coupled(plan: Plan, workload: Workload) -> Plan:
    """Return a plan without the points of its frontier that a coupling loss forbids.

    For plans that were made for a device elsewhere, from shapes alone: those for the CPU have looked at the data.
    Refused where the plan's own levers are forbidden.
    """

    def is_cut(levers: Levers, numerics: Numerics) -> bool:
        return levers.microbatch_size < plan.batch_size and numerics != "changed"

    whole = [point for point in plan.frontier if not is_cut(point.levers, point.numerics)]
    chosen = is_cut(plan.levers, plan.numerics)
    if plan.device == "cpu" or not (chosen or len(whole) < len(plan.frontier)):
        return plan
    if (found := coupled_samples(workload)) is None:
        return plan
    if chosen:
        row = OF_COUPLING_LOSS
        raise PlanError(
            f"the plan's levers.microbatch_size={plan.levers.microbatch_size} of {plan.batch_size} would change the"
            f" training: {row.other} ({found}): {row.why}. What to do: {row.instead}. The row in"
            f" docs/reference/combinations.md: {row.row()}"
        )
    return replace(plan, frontier=whole, notes=[*plan.notes, _note(found)])


def _note(found: str) -> str:
    """Return the note of a plan that leaves microbatches out."""
    return (
        f"microbatches are left out: Workload.loss_fn couples the samples of a batch ({found}), so they would"
        " change the training. If the loss is a mean over tokens or voxels, return (sum, count). A Dice over"
        " the batch or a contrastive loss is another loss for each batch size; numerics='changed' allows"
        " microbatches even so"
    )

"""Is a plan what it says? The plain step and the planned one, run side by side on copies of the workload."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import torch

from memfit._torch.modules import NormBase
from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.measured_peak import measure_peak_bytes, measure_peaks
from memfit.errors import CaptureError, RecomputationError
from memfit.hardware.host import find_device
from memfit.held_state import generators_of
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Numerics, Plan, freest
from memfit.ir.verification import GradientDifference, Verification
from memfit.levers import registry
from memfit.levers.stack import applied
from memfit.pipeline.placement import check_runs_here
from memfit.planner.batch_coupling import coupling
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import Progress, costs_of, predict, silent
from memfit.planner.proof import probe_regions
from memfit.recomputation.generators import foreign_generators, preserved
from memfit.report.notebook_progress import stages, with_bars
from memfit.rng import rng_preserved
from memfit.training.accumulation_window import gradient_values
from memfit.units import format_bytes
from memfit.workload import Workload, samples_of

TOLERANCE: dict[Numerics, float] = {"exact": 0.0, "reordered": 1e-3, "reduced": 0.25, "changed": math.inf}
"""Largest relative difference of the loss, and of all gradients in the Euclidean norm, by numerics class.

For `reduced` it tells a wrong step from a rounded one, no more: with bf16's 8 bits, gradients of a BatchNorm
network with random weights differ by more than a tenth.
"""

PREDICTION_TOLERANCE = 0.05


@with_bars(stages)
def verify(plan: Plan, workload: Workload, *, progress: Progress = silent) -> Verification:
    """Run the plain and the planned step on copies of a workload, and hold the plan to what it says.

    Both start from the same weights and the same random state. Microbatches draw their own dropout
    masks: where the plan has any, both steps are compared with modules in evaluation mode, apart from
    normalisations.

    Args:
        plan: The plan.
        workload: The workload it was made for; nothing of it is changed.
        progress: Told how many runs of each step are done, of how many; by default bars in a notebook.

    Raises:
        PlanMismatchError: The plan was made for another workload.
        PlanError: Its levers are not legal, or it was made for a device that is not here.
        WorkloadError: The model is on another device than the plan's, or holds no data.
    """
    place = check_runs_here(plan, workload)
    size = samples_of(workload)
    plain = Levers(microbatch_size=size)
    quiet = plan.levers.microbatch_size < size
    with nothing_changes(workload):
        runs = _Runs("plain step", 3, progress)
        plain_loss, plain_gradients, plain_buffers = _gradients(workload, plain, quiet, runs, place)
        plain_peak, _ = _peak(workload, plain, runs, place)
        is_again = registry.recomputes(plan.levers)
        runs = _Runs("planned step", 4 if is_again else 3, progress)
        loss, gradients, buffers = _gradients(workload, plan.levers, quiet, runs, place)
        differences = probe_regions(workload, plan.levers, place) if is_again else {}
        runs.add(is_again)
        peak, reserved = _peak(workload, plan.levers, runs, place)
    pairs = {name: (gradients[name], g) for name, g in plain_gradients.items() if name in gradients}
    each = [
        GradientDifference(parameter=name, relative=_relative([pairs[name]]), equal=_equal(*pairs[name]))
        if name in pairs
        else GradientDifference(parameter=name, relative=math.inf, equal=False)
        for name in plain_gradients
    ]
    total = _relative(list(pairs.values()))
    found = Verification(
        failures=[],
        numerics=plan.numerics,
        plain_loss=plain_loss,
        planned_loss=loss,
        loss_difference=abs(loss - plain_loss) / max(abs(plain_loss), 1e-30),
        gradient_difference=total,
        bitwise=loss == plain_loss and all(g.equal for g in each) and gradients.keys() == plain_gradients.keys(),
        gradients=sorted(each, key=lambda g: -g.relative),
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=peak,
        measured_reserved_bytes=reserved,
        plain_measured_peak_bytes=plain_peak,
        budget_bytes=plan.budget_bytes,
        notes=["compared in evaluation mode, since microbatches draw their own dropout masks"] if quiet else [],
    )
    failures = [f"a region of the plan can't be recomputed: {how}" for how in differences.values()]
    if plan.numerics == "exact":
        moved = [name for name, buffer in plain_buffers.items() if not torch.equal(buffer, buffers[name])]
        failures += [f"the step leaves other values in the buffer {name} than the plain one" for name in moved]
    progress("prediction", 0, 1)
    failures += _failures(plan, workload, found)
    progress("prediction", 1, 1)
    return msgspec.structs.replace(found, failures=failures)


class _Runs:
    """Counts the runs of a step, and reports each."""

    def __init__(self, step: str, total: int, progress: Progress) -> None:
        self._step, self._total, self._progress, self._done = step, total, progress, 0
        progress(step, 0, total)

    def add(self, count: int = 1) -> None:
        self._done += count
        self._progress(self._step, self._done, self._total)


_Tensors = dict[str, torch.Tensor]


def _gradients(
    workload: Workload, levers: Levers, quiet: bool, runs: _Runs, place: torch.device
) -> tuple[float, _Tensors, _Tensors]:
    """Return the loss, the gradients and the buffers after one step that updates nothing, on the CPU."""
    copied = real_copy(workload, place)
    if quiet:
        for module in copied.model.modules():
            if not isinstance(module, NormBase):
                module.training = False
    held = foreign_generators(generators_of(copied.model.modules()))  # those in globals are no part of the copy
    with rng_preserved(), preserved(held), applied(levers, copied) as step:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        loss, gradients = step.gradients(copied.batch)
        runs.add()
        buffers = dict(copied.model.named_buffers())
        # An accelerator may have no room for two sets of gradients beside a step.
        return loss, _on_cpu(gradients), _on_cpu(buffers)


def _on_cpu(tensors: _Tensors) -> _Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _peak(workload: Workload, levers: Levers, runs: _Runs, place: torch.device) -> tuple[int, int | None]:
    """Return the measured peaks of a step: allocated bytes, and on an accelerator reserved bytes."""
    copied = real_copy(workload, place)
    # The steps compared after this one draw from the same generators.
    held = foreign_generators(generators_of(copied.model.modules()))
    with preserved(held), applied(levers, copied) as step:
        step(copied.batch)  # makes the optimizer's state
        runs.add()
        peaks = measure_peaks(step, copied.batch)
        found = (measure_peak_bytes(step, copied.batch), None) if peaks is None else peaks
        runs.add()
        return found


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the Euclidean norm of the differences of what was found and expected, relative to what was expected."""
    alike = [_alike(found, expected) for found, expected in pairs]
    away = [float(gradient_values(found - expected).norm()) for found, expected in alike]
    return math.hypot(*away) / max(math.hypot(*(float(gradient_values(e).norm()) for _, e in alike)), 1e-30)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two gradients in one layout: where only one is sparse, both dense."""
    return (found, expected) if found.layout is expected.layout else (found.to_dense(), expected.to_dense())


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two gradients have the same bits; sparse ones with their repeated entries added up."""
    found, expected = _alike(found, expected)
    if not found.is_sparse:
        return torch.equal(found, expected)
    one, other = found.coalesce(), expected.coalesce()
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())


def _failures(plan: Plan, workload: Workload, found: Verification) -> list[str]:
    """Return the statements of a plan that do not hold."""
    failures = _prediction_failures(plan, workload, find_device(plan.device))
    taken, what = found.measured_peak_bytes, "the measured peak"
    if plan.predicted.peak_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        taken, what = found.measured_reserved_bytes, "what the allocator reserved"
    if taken > plan.budget_bytes:
        failures.append(
            f"{what}, {format_bytes(taken)}, is above the plan's budget_bytes, {format_bytes(plan.budget_bytes)}"
        )
    off = abs(found.measured_peak_bytes - plan.predicted.peak_bytes) / found.measured_peak_bytes
    if off > PREDICTION_TOLERANCE:
        failures.append(
            f"the plan predicts a peak of {format_bytes(plan.predicted.peak_bytes)}, and"
            f" {format_bytes(found.measured_peak_bytes)} was measured: {off:.1%} off, and {PREDICTION_TOLERANCE:.0%} is"
            " allowed"
        )
    missing = [g.parameter for g in found.gradients if g.relative == math.inf]
    if missing:
        failures.append(f"the planned step gives no gradient to {', '.join(missing)}")
    if plan.numerics == "exact" and not found.bitwise:
        failures.append("the plan is of class exact, but the loss or a gradient is not bitwise equal to the plain one")
    tolerance = TOLERANCE[plan.numerics]
    for what, difference in (("loss", found.loss_difference), ("gradients", found.gradient_difference)):
        if not difference <= tolerance:
            failures.append(
                f"the {what} differ by {difference:.2e}, more than class {plan.numerics} allows ({tolerance:g})"
            )
    return failures


def _prediction_failures(plan: Plan, workload: Workload, device: Device) -> list[str]:
    """Capture the planned step again, and hold what the plan says against what is captured."""
    try:
        trace = capture_levers(workload, plan.levers, device)
    except (CaptureError, RecomputationError) as e:
        return [f"the planned step can't be run: {e}"]
    failures = []
    prediction, _ = predict(trace, costs_of([trace], device), device)
    if prediction.peak_bytes != plan.predicted.peak_bytes and (
        abs(prediction.peak_bytes / plan.predicted.peak_bytes - 1) > 0.001
    ):
        failures.append(
            f"the plan states predicted.peak_bytes={plan.predicted.peak_bytes}, but its levers give"
            f" {prediction.peak_bytes}: it was changed after it was made, or made with another torch"
        )
    size = samples_of(workload)
    couples = plan.levers.microbatch_size < size and coupling(trace, workload) is not None
    uses = registry.uses(plan.levers, size, couples)
    if uses != plan.uses:
        stated, actual = ("; ".join(f"{u.name}: {u.setting}, {u.numerics}" for u in us) for us in (plan.uses, uses))
        failures.append(f"the plan states uses [{stated}], but its levers are [{actual}]")
    if plan.numerics != freest(uses):
        failures.append(f"the plan states numerics={plan.numerics!r}, but its levers have {freest(uses)!r}")
    return failures

"""What a verification holds a plan to: differences of gradients and losses, peaks, and what a capture gives."""

from __future__ import annotations

import math

import torch

from memfit.errors import CaptureError, RecomputationError
from memfit.hardware.host import find_device
from memfit.ir.plan import Numerics, Plan, freest
from memfit.ir.verification import GradientDifference, Verification
from memfit.levers import registry
from memfit.levers.lever import LeversOn
from memfit.planner.batch_coupling import coupling
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import costs_of, predict
from memfit.training.loss import gradient_values
from memfit.units import Progress, format_bytes, silent
from memfit.workload import Workload, samples_of

TOLERANCE: dict[Numerics, float] = {"exact": 0.0, "reordered": 1e-3, "reduced": 0.25, "changed": math.inf}
"""Largest relative difference of the loss, and of all gradients in the Euclidean norm, by numerics class.

For `reduced` it tells a wrong step from a rounded one, no more: with bf16's 8 bits, gradients of a BatchNorm
network with random weights differ by more than a tenth.
"""

PREDICTION_TOLERANCE = 0.05
"""Largest difference of a measured peak from the predicted one, relative to what was measured."""
COMPILED_TOLERANCE = 0.25
"""The same where compiled code takes less: it fuses more than a plan counts on, across modules in the forward pass. The
models of the tests, which are small, took up to a sixth less; a byte-level GPT took what was predicted."""

Tensors = dict[str, torch.Tensor]


def differences_of(planned: Tensors, plain: Tensors) -> tuple[list[GradientDifference], float]:
    """Return the difference of each gradient, the largest first, and of all of them together."""
    pairs = {name: (planned[name], gradient) for name, gradient in plain.items() if name in planned}
    each = [
        GradientDifference(parameter=name, relative=relative([pairs[name]]), equal=equal(*pairs[name]))
        if name in pairs
        else GradientDifference(parameter=name, relative=math.inf, equal=False)
        for name in plain
    ]
    return sorted(each, key=lambda difference: -difference.relative), relative(list(pairs.values()))


def compared(plan: Plan, loss: float, gradients: Tensors, plain_loss: float, plain: Tensors) -> Verification:
    """Return how the planned step's loss and gradients differ from the plain one's; its peak is not measured yet."""
    each, total = differences_of(gradients, plain)
    return Verification(
        failures=[],
        numerics=plan.numerics,
        plain_loss=plain_loss,
        planned_loss=loss,
        loss_difference=abs(loss - plain_loss) / max(abs(plain_loss), 1e-30),
        gradient_difference=total,
        bitwise=loss == plain_loss and all(g.equal for g in each) and gradients.keys() == plain.keys(),
        gradients=each,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=0,
        plain_measured_peak_bytes=None,
        budget_bytes=plan.budget_bytes,
        notes=[],
    )


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the Euclidean norm of the differences of what was found and expected, relative to what was expected."""
    alike = [_alike(found, expected) for found, expected in pairs]
    away = [float(gradient_values(found - expected).norm()) for found, expected in alike]
    return math.hypot(*away) / max(math.hypot(*(float(gradient_values(e).norm()) for _, e in alike)), 1e-30)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two gradients in one layout: where only one is sparse, both dense."""
    return (found, expected) if found.layout is expected.layout else (found.to_dense(), expected.to_dense())


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two gradients have the same bits; sparse ones with their repeated entries added up."""
    found, expected = _alike(found, expected)
    if not found.is_sparse:
        return torch.equal(found, expected)
    one, other = found.coalesce(), expected.coalesce()
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())


def numerics_failures(found: Verification, tolerance: float) -> list[str]:
    """Return in what the planned step differs from the plain one by more than a tolerance, relative."""
    missing = [g.parameter for g in found.gradients if g.relative == math.inf]
    failures = [f"no gradient for {', '.join(missing)}"] if missing else []
    for what, difference in (("loss", found.loss_difference), ("gradients", found.gradient_difference)):
        if not difference <= tolerance:
            failures.append(
                f"{what}: {difference:.2e} from the plain step's, and class {found.numerics} allows {tolerance:g}"
            )
    return failures


def peak_failures(plan: Plan, found: Verification) -> list[str]:
    """Return where the measured peak is not what a plan says."""
    failures = []
    taken, what = found.measured_peak_bytes, "measured peak"
    if plan.predicted.peak_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        taken, what = found.measured_reserved_bytes, "measured reserved memory"
    if taken > plan.budget_bytes:
        failures.append(
            f"{what} {format_bytes(taken)} is above the plan's budget_bytes {format_bytes(plan.budget_bytes)}"
        )
    off = abs(found.measured_peak_bytes - plan.predicted.peak_bytes) / found.measured_peak_bytes
    is_less = found.measured_peak_bytes < plan.predicted.peak_bytes
    allowed = PREDICTION_TOLERANCE
    if is_less and registry.compiles(plan.levers):
        allowed = COMPILED_TOLERANCE
    if off > allowed:
        failures.append(
            f"predicted peak {format_bytes(plan.predicted.peak_bytes)}, measured"
            f" {format_bytes(found.measured_peak_bytes)}: {off:.1%} off, {allowed:.0%} is allowed"
        )
    return failures


def prediction_failures(workload: Workload, *, plan: Plan, progress: Progress = silent) -> list[str]:
    """Capture the planned step again, and return the statements of the plan that differ from it."""
    device = find_device(plan.device)
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
    uses = registry.uses(LeversOn(plan.levers, size, couples))
    if uses != plan.uses:
        stated, actual = ("; ".join(f"{u.name}: {u.setting}, {u.numerics}" for u in us) for us in (plan.uses, uses))
        failures.append(f"the plan states uses [{stated}], but its levers are [{actual}]")
    if plan.numerics != freest(uses):
        failures.append(f"the plan states numerics={plan.numerics!r}, but its levers have {freest(uses)!r}")
    return failures

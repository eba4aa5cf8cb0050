"""Is a plan what it says? The plain step and the planned one, run side by side on copies of the workload."""

from __future__ import annotations

import functools
import random

import msgspec
import numpy as np
import torch

from memfit._torch.modules import NormBase
from memfit.capture.external_state import differences
from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.measured_peak import measure_peak_bytes, measure_peaks
from memfit.errors import NonFiniteError, UsageError
from memfit.held_state import generators_of
from memfit.ir.plan import Levers, Plan
from memfit.ir.verification import Verification
from memfit.levers import registry
from memfit.levers.stack import applied, applied_to_copy
from memfit.pipeline._verify_ranks import verify_on_ranks
from memfit.pipeline.comparison import PlainStepTooLargeError, compare
from memfit.pipeline.first_arguments import checked
from memfit.pipeline.joining import ranks_of
from memfit.pipeline.placement import check_runs_here
from memfit.pipeline.statements import (
    TOLERANCE,
    compared,
    numerics_failures,
    peak_failures,
    prediction_failures,
)
from memfit.pipeline.verbs import verb
from memfit.planner.proof import probe_regions
from memfit.progress import Progress, silent
from memfit.recomputation.generators import foreign_generators, preserved
from memfit.report.notebook_progress import stages, with_bars
from memfit.rng import rng_preserved
from memfit.workload import Workload, samples_of

_IN_EVALUATION_MODE = "compared in evaluation mode, since the planned step draws its own dropout masks"
_NAMED = 3  # differences of a copy that a note names


@checked
@with_bars(stages)
@verb
def verify(plan: Plan, workload: Workload, *, steps: int = 5, progress: Progress = silent) -> Verification:
    """Run the plain and the planned step on copies of a workload, and check the plan's statements.

    First numerics and peaks are held to the plan. Then both steps train in turn, on the same batches from the same
    start, for their times and losses: `Verification.comparison`. Steps are interleaved, so that a busy machine slows
    both alike; the first of each, which makes the optimizer's state, is not timed.

    Both start from the same weights and the same random state. Microbatches and compiled code draw their own dropout
    masks: where the plan has any, both steps are compared with modules in evaluation mode, apart from
    normalisations.

    A plan for several ranks is verified on as many, which all call this, as they call `train`. The plain step is then
    that of one process, which runs the ranks' parts of the batch one after the other and adds up their gradients. All
    ranks return the same, with the peak of each. Times and losses are compared with DistributedDataParallel's step in
    fp32, where that is predicted to fit.

    Args:
        plan: The plan.
        workload: The workload it was made for; nothing of it is changed.
        steps: Training steps of each, for times and losses; 0 for none, which is faster.
        progress: Told how many runs of each step are done, of how many; by default bars in a notebook.

    Raises:
        PlanMismatchError: The plan was made for another workload.
        PlanError: Its levers are not legal, or it was made for a device that is not here.
        WorkloadError: The model is on another device than the plan's, or holds no data.
        UsageError: The plan is for more or fewer ranks, or they have different batches; or `steps` is below 0.
    """
    if steps < 0:
        raise UsageError(f"steps={steps} is below 0: give a number of steps, or 0 for none")
    with ranks_of(plan):
        found = _held(plan, workload, progress)
        if not steps:
            return found
        try:
            comparison = compare(plan, workload, steps=steps, progress=functools.partial(progress, "plain and planned"))
        except PlainStepTooLargeError as e:
            return msgspec.structs.replace(found, notes=[*found.notes, str(e)])
        except NonFiniteError as e:  # the first steps agree; training on the same batches may still diverge
            why = f"times were not measured, as the {steps} steps in turn diverged: {e}. Give fewer steps="
            return msgspec.structs.replace(found, notes=[*found.notes, why])
        return msgspec.structs.replace(found, comparison=comparison)


def _held(plan: Plan, workload: Workload, progress: Progress) -> Verification:
    """Return numerics and peaks of the plain and the planned step, held to what the plan says."""
    if plan.levers.sharding is not None:
        return verify_on_ranks(plan, workload, progress)
    place = check_runs_here(plan, workload)
    size = samples_of(workload)
    plain = Levers(microbatch_size=size)
    quiet = plan.levers.microbatch_size < size or registry.draws_otherwise(plan.levers, size)
    with nothing_changes(workload) as around:
        tell = around.outside(progress)
        unlike = _unlike(workload, place)
        runs = _Runs("plain step", 3, tell)
        plain_loss, plain_gradients, plain_buffers = _gradients(workload, plain, quiet, runs, place)
        plain_peak, _ = _peak(workload, plain, runs, place)
        is_again = registry.recomputes(plan.levers)
        runs = _Runs("planned step", 4 if is_again else 3, tell)
        loss, gradients, buffers = _gradients(workload, plan.levers, quiet, runs, place)
        differences = probe_regions(workload, plan.levers, place) if is_again else {}
        runs.add(is_again)
        peak, reserved = _peak(workload, plan.levers, runs, place)
    found = msgspec.structs.replace(
        compared(plan, loss, gradients, plain_loss, plain_gradients),
        measured_peak_bytes=peak,
        measured_reserved_bytes=reserved,
        plain_measured_peak_bytes=plain_peak,
        notes=[*([_IN_EVALUATION_MODE] if quiet else []), *unlike],
    )
    failures = [f"a region of the plan can't be recomputed: {how}" for how in differences.values()]
    if plan.numerics == "exact":
        moved = [name for name, buffer in plain_buffers.items() if not torch.equal(buffer, buffers[name])]
        failures += [f"after the step the buffer {name} has other values than after the plain step" for name in moved]
    progress("prediction", 0, 1)
    failures += _failures(plan, workload, found)
    progress("prediction", 1, 1)
    return msgspec.structs.replace(found, failures=failures)


def _unlike(workload: Workload, place: torch.device) -> list[str]:
    """Return a note on what copies of a workload leave out or share; none where they are the step that trains."""
    found = differences(workload, real_copy(workload, place))
    if not found:
        return []
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return [f"memfit ran copies, and they differ from your objects: {'; '.join(found[:_NAMED])}{more}"]


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
    with applied_to_copy(levers, workload, place) as step:
        batch = step.workload.batch
        step(batch)  # makes the optimizer's state
        runs.add()
        peaks = measure_peaks(step, batch)
        found = (measure_peak_bytes(step, batch), None) if peaks is None else peaks
        runs.add()
        return found


def _failures(plan: Plan, workload: Workload, found: Verification) -> list[str]:
    """Return the statements of a plan that do not hold."""
    failures = prediction_failures(workload, plan=plan) + peak_failures(plan, found)
    if plan.numerics == "exact" and not found.bitwise:
        failures.append(
            "the plan is of class exact, but the loss or a gradient is not bit-identical to the plain step's"
        )
    return failures + numerics_failures(found, TOLERANCE[plan.numerics])

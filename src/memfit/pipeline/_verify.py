"""Is a plan what it says? The plain step and the planned one, run side by side on copies of the workload.

The plain step of a plan for several ranks is that of one process, which plays each of them.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from memfit._torch.modules import NormBase
from memfit._torch.operators import foreach_mul_
from memfit.capture.external_state import differences
from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.measured_peak import measure_peak_bytes, measure_peaks
from memfit.errors import NonFiniteError, UsageError
from memfit.hardware.host import find_device
from memfit.held_state import generators_of
from memfit.ir.plan import Levers, Plan
from memfit.ir.verification import Verification
from memfit.levers import registry
from memfit.levers.microbatches import MICROBATCHES
from memfit.levers.shared_by_ranks import SHARDING
from memfit.levers.stack import applied, applied_to_copy
from memfit.pipeline.comparison import PlainStepTooLargeError, compare, rank_peak_bytes
from memfit.pipeline.placement import check_runs_here, rank_place, ranks_of
from memfit.pipeline.statements import (
    TOLERANCE,
    Tensors,
    compared,
    numerics_failures,
    peak_failures,
    prediction_failures,
)
from memfit.pipeline.verbs import checked, verb
from memfit.planner import gpu_process
from memfit.planner.confirmation import probe_regions
from memfit.ranks.one_process import SingleProcess
from memfit.ranks.together import each, once
from memfit.recomputation.generators import foreign_generators, preserved
from memfit.report.notebook_progress import stages, with_bars
from memfit.rng import rng_preserved
from memfit.sparse import parts
from memfit.units import Progress, format_bytes, silent
from memfit.workload import Workload, samples_of, tensors_of

ROUNDING = 1e-6
"""Largest relative difference where only the order of additions differs, in fp32."""
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
    with ranks_of(plan) as ranks:
        if plan.levers.sharding is None:
            found = _held(plan, workload, progress)
        else:
            found = _held_on_ranks(plan, workload, ranks, progress)
        if not steps:
            return found
        try:
            comparison = compare(plan, workload, steps=steps, progress=functools.partial(progress, "plain and planned"))
            return replace(found, comparison=comparison)
        except PlainStepTooLargeError as e:
            why = str(e)
        except NonFiniteError as e:  # the first steps agree; training on the same batches may still diverge
            why = f"times were not measured, as the {steps} steps in turn diverged: {e}. Give fewer steps="
        return replace(found, notes=[*found.notes, why])


def _held(plan: Plan, workload: Workload, progress: Progress) -> Verification:
    """Return numerics and peaks of the plain and the planned step, held to what the plan says."""
    place = check_runs_here(plan, workload)
    size = samples_of(workload)
    plain = Levers(microbatch_size=size)
    quiet = plan.levers.microbatch_size < size or registry.draws_otherwise(plan.levers)
    with nothing_changes(workload) as around:
        tell = around.outside(progress)
        unlike = _unlike(workload, place)
        runs = _Runs("plain step", 3, tell)
        plain_loss, plain_gradients, plain_buffers = _gradients(workload, plain, place, quiet=quiet)
        runs.add()
        plain_peak, _ = _peak(workload, plain, place, runs.add)
        is_again = registry.recomputes(plan.levers)
        runs = _Runs("planned step", 4 if is_again else 3, tell)
        loss, gradients, buffers = _gradients(workload, plan.levers, place, quiet=quiet)
        runs.add()
        differences = probe_regions(workload, plan.levers, place) if is_again else {}
        runs.add(is_again)
        peak, reserved = _peak(workload, plan.levers, place, runs.add)
    found = replace(
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
    failures += prediction_failures(workload, plan=plan) + peak_failures(plan, found)
    if plan.numerics == "exact" and not found.bitwise:
        failures.append(
            "the plan is of class exact, but the loss or a gradient is not bit-identical to the plain step's"
        )
    failures += numerics_failures(found, TOLERANCE[plan.numerics])
    progress("prediction", 1, 1)
    return replace(found, failures=failures)


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


def _gradients(
    workload: Workload, levers: Levers, place: torch.device, *, quiet: bool = False
) -> tuple[float, Tensors, Tensors]:
    """Return the loss, the gradients and the buffers after one step that updates nothing, on the CPU."""
    copied = real_copy(workload, place)
    if quiet:
        for module in copied.model.modules():
            if not isinstance(module, NormBase):
                module.training = False
    held = foreign_generators(generators_of(copied.model.modules()))  # those in globals are no part of the copy
    with rng_preserved(), preserved(held), applied(levers, copied) as step:
        _seed()
        loss, gradients = step.gradients(copied.batch)
        buffers = dict(copied.model.named_buffers())
        # An accelerator may have no room for two sets of gradients beside a step.
        return loss, _on_cpu(gradients), _on_cpu(buffers)


def _seed() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)


def _on_cpu(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _peak(
    workload: Workload, levers: Levers, place: torch.device, ran: Callable[[], None] = lambda: None
) -> tuple[int, int | None]:
    """Return the measured peaks of a step: allocated bytes, and on an accelerator reserved bytes.

    Args:
        ran: Called after each of the two runs.
    """
    with applied_to_copy(levers, workload, place) as step:
        batch = step.workload.batch
        step(batch)  # makes the optimizer's state
        ran()
        measure = measure_peak_bytes if levers.sharding is None else rank_peak_bytes
        peaks = measure_peaks(step, batch) or (measure(step, batch), None)
        ran()
        return peaks


# Plans for several ranks


class _OfRank(NamedTuple):
    """One rank's step: its loss, its gradients' digests, the names of those that change where a unit is gathered again.

    And its peaks: allocated bytes, and on an accelerator reserved bytes.
    """

    loss: float
    digests: dict[str, str]
    differing: list[str]
    peak_bytes: int
    reserved_bytes: int | None


def _held_on_ranks(plan: Plan, workload: Workload, ranks: SingleProcess, progress: Progress) -> Verification:
    """Return what `_held` does, of a plan for several ranks. All ranks call this, and return the same."""
    place = rank_place(check_runs_here(plan, workload))
    with nothing_changes(workload) as around:
        progress = around.outside(progress)
        _check_batches(ranks, workload)
        progress("ranks", 0, 3)
        loss, gradients, _ = _gradients(workload, plan.levers, place)
        digests = {name: _digest(gradient) for name, gradient in gradients.items()}
        differing: list[str] = []
        sharding = plan.levers.sharding
        assert sharding is not None
        if sharding.is_fully_sharded and (sharding.mode != "zero3" or sharding.kept):  # some units stay gathered
            again = replace(plan.levers, sharding=replace(sharding, mode="zero3", kept=()))
            others = {name: _digest(g) for name, g in _gradients(workload, again, place)[1].items()}
            differing = [name for name in digests if digests[name] != others.get(name)]
        progress("ranks", 1, 3)
        peaks = _peak(workload, plan.levers, place)
        progress("ranks", 2, 3)
        found = each(ranks, lambda: _OfRank(loss, digests, differing, *peaks))
        progress("ranks", 3, 3)

        def verdict() -> Verification:
            made = _verdict(plan, workload, gradients, found, place, progress)
            stated = _stated(plan, workload, progress)
            return replace(made, failures=[*made.failures, *stated])

        return once(ranks, verdict)


def _check_batches(ranks: SingleProcess, workload: Workload) -> None:
    """Raise UsageError, on all ranks, unless all have the same batch."""
    digests = ranks.gathered([_digest(tensor) for tensor in tensors_of(workload.batch)])
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(
                f"Workload.batch of rank {rank} has other values than that of rank 0. Give the global batch,"
                " the same on all ranks: seed the code that makes it"
            )


def _played(workload: Workload, levers: Levers, place: torch.device) -> tuple[float, Tensors]:
    """Return the loss and the gradients that ranks are to have: this process plays each of them, without levers."""
    from memfit.ranks.one_after_another import PlayedRank  # distributed packages take a second to import

    assert levers.sharding is not None
    size, copied = levers.sharding.world_size, real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))
    buffers = [(buffer, buffer.clone()) for buffer in copied.model.buffers()]
    messages: list[list[torch.Tensor]] | None = None
    with rng_preserved(), applied(Levers(microbatch_size=levers.microbatch_size), copied) as step:
        while True:
            losses, total = list[float](), Tensors()
            played = [PlayedRank(rank, size, messages) for rank in range(size)]
            for rank in played:
                step.change(ranks=rank)
                with preserved(held):
                    _seed()
                    loss, gradients = step.gradients(copied.batch)
                losses.append(loss)
                for name, gradient in gradients.items():
                    share = gradient / size  # as the engines divide
                    total[name] = total[name] + share if name in total else share
                for buffer, before in buffers:
                    buffer.copy_(before)
            if messages is not None or all(rank.divisor is None for rank in played):
                loss = _finished(played, losses, total, levers.microbatch_size, samples_of(copied))
                return loss, _on_cpu(total)
            messages = [rank.sent for rank in played]


def _finished(played: list[Any], losses: list[float], total: Tensors, size: int, samples: int) -> float:
    """Return the loss of all ranks, and correct their gradients for the count, as `Window.finish` does."""
    divisor = played[0].divisor
    if divisor is None:
        return sum(losses) / len(played)
    loss, count = played[0].totals
    if samples % len(played) or size < samples // len(played):
        foreach_mul_(list(total.values()), divisor.double() / count)
    return float(loss / count)


def _verdict(
    plan: Plan,
    workload: Workload,
    gradients: Tensors,
    found: list[_OfRank],
    place: torch.device,
    progress: Progress,
) -> Verification:
    """Return what the ranks found, held against what one process finds."""
    progress("one process", 0, 1)
    plain_loss, plain_gradients = _played(workload, plan.levers, place)
    progress("one process", 1, 1)
    peaks = [of_rank.peak_bytes for of_rank in found]
    reserved = [of_rank.reserved_bytes for of_rank in found if of_rank.reserved_bytes is not None]
    made = replace(
        compared(plan, found[0].loss, gradients, plain_loss, plain_gradients),
        measured_peak_bytes=max(peaks),
        measured_reserved_bytes=max(reserved, default=None),
        notes=[f"the plain step runs in one process, and adds up the gradients of the parts of {len(found)} ranks"],
        rank_peaks_bytes=peaks,
    )
    upper = plan.predicted.peak_upper_bytes
    too_much = [
        f"rank {rank} has a measured peak of {format_bytes(peak)} ({peak} bytes), above the predicted upper end,"
        f" {format_bytes(upper)} ({upper} bytes)"
        for rank, peak in enumerate(peaks)
        if peak > upper
    ]
    failures = [*_disagreements(found), *too_much, *peak_failures(plan, made)]
    if _is_bitwise(plan, samples_of(workload)) and not made.bitwise:
        unequal = next((difference for difference in made.gradients if not difference.equal), None)
        furthest = "the loss" if unequal is None else f"{unequal.parameter} differs by {unequal.relative:.2e}"
        failures.append(
            "two ranks must be bit-identical to one process that adds up two halves, but the loss or a"
            f" gradient is not: {furthest}"
        )
    failures += numerics_failures(made, ROUNDING if _only_reorders(plan) else TOLERANCE[plan.numerics])
    return replace(made, failures=failures)


def _disagreements(found: list[_OfRank]) -> list[str]:
    """Return in what ranks have other gradients than the first, and others where parameters don't stay gathered."""
    failures = []
    first = found[0]
    for rank, own in enumerate(found):
        names = [n for n in {**first.digests, **own.digests} if first.digests.get(n) != own.digests.get(n)]
        if names or own.loss != first.loss:
            what = f"gradient of {', '.join(names)}" if names else f"loss ({own.loss:.9g} against {first.loss:.9g})"
            failures.append(f"rank {rank} has another {what} than rank 0; all ranks must have that of the whole batch")
        if own.differing:
            failures.append(
                f"rank {rank}: the gradient of {', '.join(own.differing)} differs between parameters that stay"
                " gathered and parameters gathered again"
            )
    return failures


def _only_reorders(plan: Plan) -> bool:
    """Tell whether nothing but the order of additions differs from the plain step, in fp32 throughout."""
    sharding = plan.levers.sharding
    is_reduced = sharding is not None and (sharding.param_dtype or sharding.reduce_dtype) is not None
    others = [use for use in plan.uses if use.numerics != "exact" and use.name not in (SHARDING, MICROBATCHES)]
    return plan.levers.precision == "32-true" and not is_reduced and not others


def _is_bitwise(plan: Plan, batch_size: int) -> bool:
    """Tell whether ranks are bitwise one process that adds up their gradients.

    Two are, where each sends the sum of its microbatches: a sum of two has one order.
    """
    sharding = plan.levers.sharding
    assert sharding is not None
    is_sent_once = sharding.reduces == "last" or plan.levers.microbatch_size >= -(-batch_size // sharding.world_size)
    return sharding.world_size == 2 and is_sent_once and _only_reorders(plan)


def _stated(plan: Plan, workload: Workload, progress: Progress) -> list[str]:
    """Return what a plan says otherwise than a capture of its step, in a process that is in no group."""
    progress("prediction", 0, 1)
    fakes_cuda = gpu_process.is_elsewhere(find_device(plan.device))
    options, sizes = {"plan": plan}, [plan.levers.microbatch_size]
    failures = gpu_process.call(
        prediction_failures, workload, options, lambda *_: None, sizes=sizes, fakes_cuda=fakes_cuda
    )
    progress("prediction", 1, 1)
    return failures


def _digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's shape and values."""
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    for part in parts(tensor.coalesce() if tensor.is_sparse else tensor):
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Is a plan what it says? The plain step and the planned one, run side by side on copies of the workload.

The plain step of a plan for several ranks is that of one process, which plays each of them.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from memfit import planner
from memfit._torch import NormBase, foreach_mul_
from memfit.capture import differences, measure_peak_bytes, measure_peaks, nothing_changes, real_copy
from memfit.cost import Pace, busy_notes
from memfit.errors import CaptureError, NonFiniteError, RecomputationError, UsageError
from memfit.foundations import Progress, format_bytes, silent
from memfit.hardware import find_device, synchronize
from memfit.ir import Comparison, GradientDifference, Levers, Numerics, Plan, Sharding, Verification, freest
from memfit.levers import (
    MICROBATCHES,
    SHARDING,
    LeversOn,
    applied,
    applied_to_copy,
    compiles,
    draws_otherwise,
    lever_uses,
    recomputes,
    rounding,
)
from memfit.pipeline.placement import check_runs_here, place_of, rank_place, ranks_of
from memfit.pipeline.verbs import checked, verb
from memfit.planner import coupling, predicted_under, probe_regions
from memfit.ranks import SingleProcess, each, once
from memfit.recomputation import foreign_generators, preserved
from memfit.report import stages, with_bars
from memfit.training import Step, gradient_values
from memfit.workload import Workload, generators_of, parts, rng_preserved, samples_of, tensors_of

TOLERANCE: dict[Numerics, float] = {"exact": 0.0, "reordered": 1e-3, "reduced": 0.25, "changed": math.inf}
"""Largest relative difference of the loss, and of all gradients in the Euclidean norm, by numerics class.

For `reduced` it tells a wrong step from a rounded one, no more: with bf16's 8 bits, gradients of a BatchNorm
network with random weights differ by more than a tenth.
"""
ROUNDING = 1e-6
"""Largest relative difference where only the order of additions differs, in fp32."""
PREDICTION_TOLERANCE = 0.05
"""Largest difference of a measured peak from the predicted one, relative to what was measured."""
COMPILED_TOLERANCE = 0.25
"""The same where compiled code takes less: it fuses more than a plan counts on, across modules in the forward pass. The
models of the tests, which are small, took up to a sixth less; a byte-level GPT took what was predicted."""
_IN_EVALUATION_MODE = "compared in evaluation mode, since the planned step draws its own dropout masks"
_NAMED = 3  # differences of a copy that a note names
_MEASUREMENTS = 3  # of which the least counts: gloo's threads may hold what was sent for a moment longer

Tensors = dict[str, torch.Tensor]
Outcome = tuple[float, Tensors]
"""The loss and the gradients of a step."""


class PlainStepTooLargeError(UsageError):
    """The plain step of several ranks is predicted not to fit, so that nothing is compared with it."""


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
        held = _held if plan.levers.sharding is None else _held_on_ranks
        found = held(plan, workload, ranks, progress)
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


def _held(plan: Plan, workload: Workload, ranks: SingleProcess, progress: Progress) -> Verification:
    """Return numerics and peaks of the plain and the planned step, held to what the plan says."""
    place = check_runs_here(plan, workload)
    plain, is_exact = Levers(microbatch_size=samples_of(workload)), plan.numerics == "exact"
    quiet = plan.levers.microbatch_size < plain.microbatch_size or draws_otherwise(plan.levers)
    with nothing_changes(workload) as around:
        tell = around.outside(progress)
        unlike = differences(workload, real_copy(workload, place))
        ran = _counting(tell, "plain step", 3)
        expected, buffers = _gradients(workload, plain, place, quiet=quiet)
        ran()
        plain_peak, _ = _peaks(workload, plain, place, ran)
        is_again = recomputes(plan.levers)
        ran = _counting(tell, "planned step", 4 if is_again else 3)
        given, own_buffers = _gradients(workload, plan.levers, place, quiet=quiet)
        ran()
        rounded = None
        if rounding(plan.levers):
            rounded, _ = _gradients(workload, plain, place, quiet=quiet, rounded=plan.levers)
        differing = probe_regions(workload, plan.levers, place) if is_again else {}
        ran(is_again)
        peak, reserved = _peaks(workload, plan.levers, place, ran)
    notes = [_IN_EVALUATION_MODE] if quiet else []
    if unlike:
        more = f" and {len(unlike) - _NAMED} more" if len(unlike) > _NAMED else ""
        notes.append(f"memfit ran copies, and they differ from your objects: {'; '.join(unlike[:_NAMED])}{more}")
    found = _compared(plan, given, expected, peak, reserved, notes, plain_measured_peak_bytes=plain_peak)
    failures = [f"a region of the plan can't be recomputed: {how}" for how in differing.values()]
    moved = [name for name, buffer in buffers.items() if is_exact and not torch.equal(buffer, own_buffers[name])]
    failures += [f"after the step the buffer {name} has other values than after the plain step" for name in moved]
    progress("prediction", 0, 1)
    failures += prediction_failures(workload, plan=plan) + _peak_failures(plan, found)
    if is_exact and not found.bitwise:
        failures.append(
            "the plan is of class exact, but the loss or a gradient is not bit-identical to the plain step's"
        )
    if rounded is None:
        failures += _numerics_failures(found, TOLERANCE[plan.numerics])
    else:  # what rounding weights changes is shown, and that nothing else does is proven
        names = {lever.name for lever in rounding(plan.levers)}
        briefs = [use.brief for use in plan.uses if use.name in names]
        others = freest(use for use in plan.uses if use.name not in names)
        held = _compared(plan, given, rounded, peak, reserved, [], plain_measured_peak_bytes=plain_peak)
        failures += _numerics_failures(held, max(TOLERANCE[others], ROUNDING), others)
        notes.append(
            f"the planned step was compared with the plain step under {' and '.join(briefs)} too: the loss differs by"
            f" {held.loss_difference:.1e} and the gradients by {held.gradient_difference:.1e}. The other differences"
            " come from the rounded weights"
        )
    progress("prediction", 1, 1)
    return replace(found, failures=failures, notes=notes)


def _counting(progress: Progress, step: str, total: int) -> Callable[..., None]:
    """Return what is called after each run of a step, and reports how many are done."""
    done = 0

    def ran(count: int = 1) -> None:
        nonlocal done
        done += count
        progress(step, done, total)

    ran(0)
    return ran


def _gradients(
    workload: Workload, levers: Levers, place: torch.device, *, quiet: bool = False, rounded: Levers | None = None
) -> tuple[Outcome, Tensors]:
    """Return the outcome and the buffers after one step that updates nothing, on the CPU.

    With `rounded`, the copy has the weights that a step under those levers computes with.
    """
    copied = real_copy(workload, place)
    if rounded is not None:
        for lever in rounding(rounded):
            lever.round_weights(rounded, copied.model)
    if quiet:
        for module in copied.model.modules():
            if not isinstance(module, NormBase):
                module.training = False
    held = foreign_generators(generators_of(copied.model.modules()))  # those in globals are no part of the copy
    with rng_preserved(), preserved(held), applied(levers, copied) as step:
        _seed()
        loss, gradients = step.gradients(copied.batch)
        # An accelerator may have no room for two sets of gradients beside a step.
        return (loss, _on_cpu(gradients)), _on_cpu(dict(copied.model.named_buffers()))


def _seed() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)


def _on_cpu(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _peaks(
    workload: Workload, levers: Levers, place: torch.device, ran: Callable[[], None] = lambda: None
) -> tuple[int, int | None]:
    """Return the measured peaks of a step: allocated bytes, and on an accelerator reserved bytes."""
    with applied_to_copy(levers, workload, place) as step:
        batch = step.workload.batch
        step(batch)  # makes the optimizer's state
        ran()
        measure = measure_peak_bytes if levers.sharding is None else _rank_peak_bytes
        peaks = measure_peaks(step, batch) or (measure(step, batch), None)
        ran()
        return peaks


def _rank_peak_bytes(step: Step, batch: Any) -> int:
    """Return the peak of a rank's step, after one that made the optimizer's state. All ranks call this."""
    if place_of(step.workload).type != "cpu":
        return measure_peak_bytes(step, batch)
    step(batch)  # DistributedDataParallel fills its buckets in another order from here on
    gc.collect()
    return min(measure_peak_bytes(step, batch) for _ in range(_MEASUREMENTS))


# Times and losses


def compare(
    plan: Plan, workload: Workload, *, steps: int, progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Train the plain and the planned step side by side on copies, on the same batches from the same start.

    Steps are interleaved, so that a busy machine slows both alike; the first of each, which makes the
    optimizer's state, is not timed.

    A plan for several ranks is compared on as many, which all call this. The plain step is then
    DistributedDataParallel's in fp32: each rank runs its part of the batch in one pass, and recomputes nothing. Peaks
    are of the rank that holds most, times of the one that takes longest. Where that step is predicted not to fit,
    `PlainStepTooLargeError` is raised: one rank that runs out leaves the others waiting.
    """
    place = check_runs_here(plan, workload)
    batches = first_batches(workload, steps)
    plain_levers = Levers(microbatch_size=plan.batch_size)
    with ranks_of(plan) as ranks, nothing_changes(workload) as around:
        progress = None if progress is None else around.outside(progress)
        if (sharding := plan.levers.sharding) is not None:
            needed = plan.plain.peak_reserved_bytes or plan.plain.peak_bytes
            least = -int(ranks.most([-find_device(plan.device).usable_bytes])[0])
            if needed > least:
                raise PlainStepTooLargeError(
                    f"the plain step needs {format_bytes(needed)} on each rank, and {plan.device} has"
                    f" {format_bytes(least)}: memfit can't run it to compare the plan with it. Compare on a smaller"
                    " batch or model"
                )
            data_parallel = Sharding(world_size=sharding.world_size, mode="ddp", gradient_as_bucket_view=True)
            size = -(-plan.batch_size // sharding.world_size)
            plain_levers = Levers(microbatch_size=size, sharding=data_parallel)
        if ranks.size > 1:
            place = rank_place(place)
        copies = [real_copy(workload, place), real_copy(workload, place)]
        losses, seconds = ([list[float](), list[float]()] for _ in range(2))
        own_seconds = 0.0
        with applied(plain_levers, copies[0]) as plain, applied(plan.levers, copies[1]) as planned:
            pace = Pace() if place.type == "cpu" and ranks.size == 1 else None  # ranks wait for one another
            for index, batch in enumerate(batches):
                is_timed = index > 0 or len(batches) == 1
                for which, step in enumerate((plain, planned)):
                    if is_timed and pace is not None:
                        pace.read()
                    torch.manual_seed(index)
                    started, own = time.perf_counter(), time.thread_time()
                    losses[which].append(step(batch).loss)
                    synchronize(place_of(step.workload))  # or the next step would wait for this one's update
                    if is_timed:
                        seconds[which].append(time.perf_counter() - started)
                        own_seconds += time.thread_time() - own
                if progress is not None:
                    progress(index + 1, len(batches))
            share = own_seconds / sum(map(sum, seconds))
            notes = [] if pace is None else busy_notes("they ran", share, pace.slowdown)
            measure = measure_peak_bytes if ranks.size == 1 else _rank_peak_bytes
            peaks = [measure(step, batches[0]) for step in (plain, planned)]
        # Of the rank that holds most, and of the one that takes longest.
        plain_bytes, planned_bytes, *medians = ranks.most([*peaks, *map(statistics.median, seconds)])
    return Comparison(
        plain_peak_bytes=int(plain_bytes),
        planned_peak_bytes=int(planned_bytes),
        plain_step_seconds=medians[0],
        planned_step_seconds=medians[1],
        plain_losses=losses[0],
        planned_losses=losses[1],
        notes=tuple(notes),
    )


def first_batches(workload: Workload, count: int) -> list[Any]:
    """Return the first training batches, whole ones only; the position of the user's data is left as it was."""
    if workload.batches is None:
        return [workload.batch] * count
    state = workload.batches.state_dict() if hasattr(workload.batches, "state_dict") else None
    found: list[Any] = []
    shapes = [tuple(t.shape) for t in tensors_of(workload.batch)]
    try:
        with rng_preserved():
            while len(found) < count:
                before = len(found)
                for batch in workload.batches:
                    if [tuple(t.shape) for t in tensors_of(batch)] == shapes:
                        found.append(batch)
                    if len(found) == count:
                        break
                if len(found) == before:
                    return [workload.batch] * count
    finally:
        if state is not None:
            workload.batches.load_state_dict(state)  # type: ignore[attr-defined]
    return found


# What a plan is held to


def _compared(
    plan: Plan,
    given: Outcome,
    expected: Outcome,
    peak_bytes: int,
    reserved_bytes: int | None,
    notes: list[str],
    **more: Any,
) -> Verification:
    """Return how the planned step differs from the plain one, with the peaks that were measured."""
    (loss, gradients), (plain_loss, plain) = given, expected
    pairs = {name: (gradients[name], gradient) for name, gradient in plain.items() if name in gradients}
    found = [
        GradientDifference(
            parameter=name,
            relative=gradient_difference([pairs[name]]) if name in pairs else math.inf,
            equal=name in pairs and same_gradient(*pairs[name]),
        )
        for name in plain
    ]
    return Verification(
        failures=[],
        numerics=plan.numerics,
        plain_loss=plain_loss,
        planned_loss=loss,
        loss_difference=abs(loss - plain_loss) / max(abs(plain_loss), 1e-30),
        gradient_difference=gradient_difference(list(pairs.values())),
        bitwise=loss == plain_loss and all(g.equal for g in found) and gradients.keys() == plain.keys(),
        gradients=sorted(found, key=lambda difference: -difference.relative),
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=peak_bytes,
        measured_reserved_bytes=reserved_bytes,
        budget_bytes=plan.budget_bytes,
        notes=notes,
        **{"plain_measured_peak_bytes": None} | more,
    )


def gradient_difference(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the Euclidean norm of the differences of what was found and expected, relative to what was expected."""
    alike = [_alike(found, expected) for found, expected in pairs]
    away = [float(gradient_values(found - expected).norm()) for found, expected in alike]
    return math.hypot(*away) / max(math.hypot(*(float(gradient_values(e).norm()) for _, e in alike)), 1e-30)


def _alike(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two gradients in one layout: where only one is sparse, both dense."""
    return (found, expected) if found.layout is expected.layout else (found.to_dense(), expected.to_dense())


def same_gradient(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two gradients have the same bits; sparse ones with their repeated entries added up."""
    found, expected = _alike(found, expected)
    if not found.is_sparse:
        return torch.equal(found, expected)
    one, other = found.coalesce(), expected.coalesce()
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())


def _numerics_failures(found: Verification, tolerance: float, numerics: Numerics | None = None) -> list[str]:
    """Return in what the planned step differs from the plain one by more than a tolerance, relative."""
    missing = [g.parameter for g in found.gradients if g.relative == math.inf]
    failures = [f"no gradient for {', '.join(missing)}"] if missing else []
    for what, difference in (("loss", found.loss_difference), ("gradients", found.gradient_difference)):
        if not difference <= tolerance:
            failures.append(
                f"{what}: {difference:.2e} from the plain step's, and class {numerics or found.numerics} allows"
                f" {tolerance:g}"
            )
    return failures


def _peak_failures(plan: Plan, found: Verification) -> list[str]:
    """Return where the measured peak is not what a plan says."""
    failures = list[str]()
    taken, what = found.measured_peak_bytes, "measured peak"
    if plan.predicted.peak_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        taken, what = found.measured_reserved_bytes, "measured reserved memory"
    if taken > plan.budget_bytes:
        failures.append(
            f"{what} {format_bytes(taken)} is above the plan's budget_bytes {format_bytes(plan.budget_bytes)}"
        )
    off = abs(found.measured_peak_bytes - plan.predicted.peak_bytes) / found.measured_peak_bytes
    is_less = found.measured_peak_bytes < plan.predicted.peak_bytes
    allowed = COMPILED_TOLERANCE if is_less and compiles(plan.levers) else PREDICTION_TOLERANCE
    if off > allowed:
        failures.append(
            f"predicted peak {format_bytes(plan.predicted.peak_bytes)}, measured"
            f" {format_bytes(found.measured_peak_bytes)}: {off:.1%} off, {allowed:.0%} is allowed"
        )
    return failures


def prediction_failures(workload: Workload, *, plan: Plan, progress: Progress = silent) -> list[str]:
    """Capture the planned step again, and return the statements of the plan that differ from it."""
    try:
        prediction, trace = predicted_under(replace(plan, engine=None), workload)  # no engine runs here
    except (CaptureError, RecomputationError) as e:
        return [f"the planned step can't be run: {e}"]
    failures = []
    if prediction.peak_bytes != plan.predicted.peak_bytes and (
        abs(prediction.peak_bytes / plan.predicted.peak_bytes - 1) > 0.001
    ):
        failures.append(
            f"the plan states predicted.peak_bytes={plan.predicted.peak_bytes}, but its levers give"
            f" {prediction.peak_bytes}: it was changed after it was made, or made with another torch"
        )
    size = samples_of(workload)
    couples = plan.levers.microbatch_size < size and coupling(trace, workload) is not None
    uses = lever_uses(LeversOn(plan.levers, size, couples))
    if uses != plan.uses:
        stated, actual = ("; ".join(f"{u.name}: {u.setting}, {u.numerics}" for u in us) for us in (plan.uses, uses))
        failures.append(f"the plan states uses [{stated}], but its levers are [{actual}]")
    if plan.numerics != freest(uses):
        failures.append(f"the plan states numerics={plan.numerics!r}, but its levers have {freest(uses)!r}")
    return failures


# Plans for several ranks


class _OfRank(NamedTuple):
    loss: float
    digests: dict[str, str]  # of gradients
    differing: list[str]  # those that change where a unit is gathered again
    peak_bytes: int
    reserved_bytes: int | None  # on an accelerator


def _held_on_ranks(plan: Plan, workload: Workload, ranks: SingleProcess, progress: Progress) -> Verification:
    """Return what `_held` does, of a plan for several ranks. All ranks call this, and return the same."""
    place, sharding = rank_place(check_runs_here(plan, workload)), plan.levers.sharding
    assert sharding is not None

    def digests(levers: Levers) -> tuple[Outcome, dict[str, str]]:
        (loss, gradients), _ = _gradients(workload, levers, place)
        return (loss, gradients), {name: _digest(gradient) for name, gradient in gradients.items()}

    with nothing_changes(workload) as around:
        progress = around.outside(progress)
        batches = ranks.gathered([_digest(tensor) for tensor in tensors_of(workload.batch)])
        for rank, batch in enumerate(batches):
            if batch != batches[0]:
                raise UsageError(
                    f"Workload.batch of rank {rank} has other values than that of rank 0. Give the global batch,"
                    " the same on all ranks: seed the code that makes it"
                )
        progress("ranks", 0, 3)
        given, own = digests(plan.levers)
        differing: list[str] = []
        if sharding.is_fully_sharded and (sharding.mode != "zero3" or sharding.kept):  # some units stay gathered
            _, others = digests(replace(plan.levers, sharding=replace(sharding, mode="zero3", kept=())))
            differing = [name for name in own if own[name] != others.get(name)]
        progress("ranks", 1, 3)
        peaks = _peaks(workload, plan.levers, place)
        progress("ranks", 2, 3)
        found = each(ranks, lambda: _OfRank(given[0], own, differing, *peaks))
        progress("ranks", 3, 3)
        return once(ranks, lambda: _verdict(plan, workload, sharding, given, found, place, progress))


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    for part in parts(tensor.coalesce() if tensor.is_sparse else tensor):
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _verdict(
    plan: Plan,
    workload: Workload,
    sharding: Sharding,
    given: Outcome,
    found: list[_OfRank],
    place: torch.device,
    progress: Progress,
) -> Verification:
    """Return what the ranks found, held against what one process finds and what the plan says."""
    progress("one process", 0, 1)
    expected = played(workload, plan.levers, place)
    progress("one process", 1, 1)
    failures, first = list[str](), found[0]
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
    peaks, upper = [of_rank.peak_bytes for of_rank in found], plan.predicted.peak_upper_bytes
    reserved = max((of_rank.reserved_bytes for of_rank in found if of_rank.reserved_bytes is not None), default=None)
    notes = [f"the plain step runs in one process, and adds up the gradients of the parts of {len(found)} ranks"]
    made = _compared(plan, given, expected, max(peaks), reserved, notes, rank_peaks_bytes=peaks)
    failures += [
        f"rank {rank} has a measured peak of {format_bytes(peak)} ({peak} bytes), above the predicted upper end,"
        f" {format_bytes(upper)} ({upper} bytes)"
        for rank, peak in enumerate(peaks)
        if peak > upper
    ]
    failures += _peak_failures(plan, made)
    # Where nothing but the order of additions differs, in fp32 throughout, two ranks that each send the sum of their
    # microbatches are bitwise one process: a sum of two has one order.
    is_reduced = (sharding.param_dtype or sharding.reduce_dtype) is not None
    others = [use for use in plan.uses if use.numerics != "exact" and use.name not in (SHARDING, MICROBATCHES)]
    only_reorders = plan.levers.precision == "32-true" and not is_reduced and not others
    is_sent_once = sharding.reduces == "last" or plan.levers.microbatch_size >= -(-samples_of(workload) // len(found))
    if len(found) == 2 and is_sent_once and only_reorders and not made.bitwise:
        unequal = next((difference for difference in made.gradients if not difference.equal), None)
        furthest = "the loss" if unequal is None else f"{unequal.parameter} differs by {unequal.relative:.2e}"
        failures.append(
            "two ranks must be bit-identical to one process that adds up two halves, but the loss or a"
            f" gradient is not: {furthest}"
        )
    failures += _numerics_failures(made, ROUNDING if only_reorders else TOLERANCE[plan.numerics])
    progress("prediction", 0, 1)
    failures += planner.call_elsewhere(  # in a process that is in no group
        prediction_failures,
        workload,
        [{"plan": plan}],
        lambda *_: None,
        sizes=[plan.levers.microbatch_size],
        fakes_cuda=planner.is_elsewhere(find_device(plan.device)),
    )[0]
    progress("prediction", 1, 1)
    return replace(made, failures=failures)


def played(workload: Workload, levers: Levers, place: torch.device) -> Outcome:
    """Return the loss and the gradients that ranks are to have: this process plays each of them, without levers."""
    from memfit.ranks import PlayedRank  # distributed packages take a second to import

    assert levers.sharding is not None
    size, copied = levers.sharding.world_size, real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))
    buffers = [(buffer, buffer.clone()) for buffer in copied.model.buffers()]
    messages: list[list[torch.Tensor]] | None = None
    with rng_preserved(), applied(Levers(microbatch_size=levers.microbatch_size), copied) as step:
        while True:
            losses, total = list[float](), Tensors()
            ranks = [PlayedRank(rank, size, messages) for rank in range(size)]
            for rank in ranks:
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
            divisor = ranks[0].divisor
            if messages is None and any(rank.divisor is not None for rank in ranks):
                messages = [rank.sent for rank in ranks]
                continue
            if divisor is None:
                return sum(losses) / size, _on_cpu(total)
            of_all, count = ranks[0].totals
            samples = samples_of(copied)
            if samples % size or levers.microbatch_size < samples // size:  # as `Window.finish` corrects gradients
                foreach_mul_(list(total.values()), divisor.double() / count)
            return float(of_all / count), _on_cpu(total)

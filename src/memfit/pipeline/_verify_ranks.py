"""Is a plan for several ranks what it says? The shared step of live ranks, against one process that plays them all."""

from __future__ import annotations

import gc
import hashlib
import random
from typing import Any

import msgspec
import numpy as np
import torch

from memfit._torch.foreach import foreach_mul_
from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.measured_peak import measure_peak_bytes, measure_peaks
from memfit.errors import UsageError
from memfit.hardware.host import find_device
from memfit.held_state import generators_of
from memfit.ir.plan import Levers, Plan
from memfit.ir.verification import Verification
from memfit.levers.microbatches import MICROBATCHES
from memfit.levers.shared_by_ranks import SHARDING
from memfit.levers.stack import applied
from memfit.pipeline.joining import ranks_of
from memfit.pipeline.placement import check_runs_here, place_of, rank_place
from memfit.pipeline.statements import (
    TOLERANCE,
    Gradients,
    compared,
    numerics_failures,
    peak_failures,
    prediction_failures,
)
from memfit.planner import gpu_process
from memfit.progress import Progress
from memfit.ranks.one_process import SingleProcess
from memfit.ranks.together import each, once
from memfit.recomputation.generators import foreign_generators, preserved
from memfit.rng import rng_preserved
from memfit.sparse import parts
from memfit.training.step import Step
from memfit.units import format_bytes
from memfit.workload import Workload, samples_of, tensors_of

ROUNDING = 1e-6
"""Largest relative difference where only the order of additions differs, in fp32."""

_MEASUREMENTS = 3  # of which the least counts: gloo's threads may hold what was sent for a moment longer


def verify_on_ranks(plan: Plan, workload: Workload, progress: Progress) -> Verification:
    """Hold a plan for several ranks to what it says; see `verify`. All ranks call this, and return the same."""
    place = check_runs_here(plan, workload)
    with ranks_of(plan) as ranks, nothing_changes(workload) as around:
        progress = around.outside(progress)
        place = rank_place(place)
        _check_batches(ranks, workload)
        progress("ranks", 0, 3)
        loss, gradients = _shared_gradients(workload, plan.levers, place)
        digests = {name: _digest(gradient) for name, gradient in gradients.items()}
        again = _gathered_again(plan.levers)
        differing: list[str] = []
        if again is not None:
            others = {name: _digest(g) for name, g in _shared_gradients(workload, again, place)[1].items()}
            differing = [name for name in digests if digests[name] != others.get(name)]
        progress("ranks", 1, 3)
        peak, reserved = _peaks(workload, plan.levers, place)
        progress("ranks", 2, 3)
        found = each(ranks, lambda: (loss, digests, differing, peak, reserved))
        progress("ranks", 3, 3)

        def verdict() -> Verification:
            made = _verdict(plan, workload, gradients, found, place, progress)
            stated = _stated(plan, workload, progress)
            return msgspec.structs.replace(made, failures=[*made.failures, *stated])

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


def _shared_gradients(workload: Workload, levers: Levers, place: torch.device) -> tuple[float, Gradients]:
    """Return the loss and the gradients of one step that ranks share, and that updates nothing, on the CPU."""
    copied = real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))  # those in globals are no part of the copy
    with rng_preserved(), preserved(held), applied(levers, copied) as step:
        _seed()
        loss, gradients = step.gradients(copied.batch)
        return loss, {name: gradient.cpu() for name, gradient in gradients.items()}


def _seed() -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)


def _gathered_again(levers: Levers) -> Levers | None:
    """Return the levers with which no unit stays gathered; None where none does."""
    sharding = levers.sharding
    if sharding is None or not sharding.is_fully_sharded or (sharding.mode == "zero3" and not sharding.kept):
        return None
    return msgspec.structs.replace(levers, sharding=msgspec.structs.replace(sharding, mode="zero3", kept=()))


def _peaks(workload: Workload, levers: Levers, place: torch.device) -> tuple[int, int | None]:
    """Return the measured peaks of this rank's step: allocated bytes, and on an accelerator reserved bytes."""
    copied = real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))
    with preserved(held), applied(levers, copied) as step:
        step(copied.batch)  # makes the optimizer's state
        peaks = measure_peaks(step, copied.batch)
        return (rank_peak_bytes(step, copied.batch), None) if peaks is None else peaks


def rank_peak_bytes(step: Step, batch: Any) -> int:
    """Return the peak of a rank's step, after one that made the optimizer's state. All ranks call this."""
    if place_of(step.workload).type != "cpu":
        return measure_peak_bytes(step, batch)
    step(batch)  # DistributedDataParallel fills its buckets in another order from here on
    gc.collect()
    return min(measure_peak_bytes(step, batch) for _ in range(_MEASUREMENTS))


# On the first rank


def _played(workload: Workload, levers: Levers, place: torch.device) -> tuple[float, Gradients]:
    """Return the loss and the gradients that ranks are to have: this process plays each of them, without levers."""
    from memfit.ranks.one_after_another import PlayedRank  # distributed packages take a second to import

    assert levers.sharding is not None
    size, copied = levers.sharding.world_size, real_copy(workload, place)
    held = foreign_generators(generators_of(copied.model.modules()))
    buffers = [(buffer, buffer.clone()) for buffer in copied.model.buffers()]
    messages: list[list[torch.Tensor]] | None = None
    with rng_preserved(), applied(Levers(microbatch_size=levers.microbatch_size), copied) as step:
        while True:
            losses, total = [], Gradients()
            played = [PlayedRank(rank, size, messages) for rank in range(size)]
            for rank in played:
                with preserved(held):
                    losses.append(_add(step, copied.batch, rank, total))
                for buffer, before in buffers:
                    buffer.copy_(before)
            if messages is not None or all(rank.divisor is None for rank in played):
                loss = _finished(played, losses, total, levers.microbatch_size, samples_of(copied))
                return loss, {name: gradient.cpu() for name, gradient in total.items()}
            messages = [rank.sent for rank in played]


def _finished(played: list[Any], losses: list[float], total: Gradients, size: int, samples: int) -> float:
    """Return the loss of all ranks, and correct their gradients for the count, as `Window.finish` does."""
    divisor = played[0].divisor
    if divisor is None:
        return sum(losses) / len(played)
    loss, count = played[0].totals
    if samples % len(played) or size < samples // len(played):
        foreach_mul_(list(total.values()), divisor.double() / count)
    return float(loss / count)


def _add(step: Step, batch: Any, rank: Any, total: Gradients) -> float:
    """Add the gradients of a rank to the total, divided as the engines do; return its loss."""
    step.change(ranks=rank)
    _seed()
    loss, gradients = step.gradients(batch)
    for name, gradient in gradients.items():
        share = gradient / rank.size
        total[name] = total[name] + share if name in total else share
    return loss


def _verdict(
    plan: Plan, workload: Workload, gradients: Gradients, found: list[Any], place: torch.device, progress: Progress
) -> Verification:
    """Return what the ranks found, held against what one process finds."""
    progress("one process", 0, 1)
    plain_loss, plain_gradients = _played(workload, plan.levers, place)
    progress("one process", 1, 1)
    peaks = [of_rank[3] for of_rank in found]
    reserved = [of_rank[4] for of_rank in found if of_rank[4] is not None]
    made = msgspec.structs.replace(
        compared(plan, found[0][0], gradients, plain_loss, plain_gradients),
        measured_peak_bytes=max(peaks),
        measured_reserved_bytes=max(reserved, default=None),
        notes=_notes(plan),
        rank_peaks_bytes=peaks,
    )
    failures = _disagreements(found) + _rank_peak_failures(plan, peaks) + peak_failures(plan, made)
    size = samples_of(workload)
    if _is_bitwise(plan.levers, plan, size) and not made.bitwise:
        failures.append(
            "two ranks must be bit-identical to one process that adds up two halves, but the loss or a"
            f" gradient is not: {_furthest(made)}"
        )
    failures += numerics_failures(made, ROUNDING if _only_reorders(plan) else TOLERANCE[plan.numerics])
    return msgspec.structs.replace(made, failures=failures)


def _furthest(made: Verification) -> str:
    unequal = [difference for difference in made.gradients if not difference.equal]
    return f"{unequal[0].parameter} differs by {unequal[0].relative:.2e}" if unequal else "the loss"


def _disagreements(found: list[Any]) -> list[str]:
    """Return in what ranks have other gradients than the first, and others where parameters don't stay gathered."""
    failures = []
    (loss, digests, *_), *_ = found
    for rank, (own_loss, own, differing, *_) in enumerate(found):
        names = [name for name in {**digests, **own} if digests.get(name) != own.get(name)]
        if names or own_loss != loss:
            what = f"gradient of {', '.join(names)}" if names else f"loss ({own_loss:.9g} against {loss:.9g})"
            failures.append(f"rank {rank} has another {what} than rank 0; all ranks must have that of the whole batch")
        if differing:
            failures.append(
                f"rank {rank}: the gradient of {', '.join(differing)} differs between parameters that stay"
                " gathered and parameters gathered again"
            )
    return failures


def _rank_peak_failures(plan: Plan, peaks: list[int]) -> list[str]:
    upper = plan.predicted.peak_upper_bytes
    return [
        f"rank {rank} has a measured peak of {format_bytes(peak)} ({peak} bytes), above the predicted upper end,"
        f" {format_bytes(upper)} ({upper} bytes)"
        for rank, peak in enumerate(peaks)
        if peak > upper
    ]


def _only_reorders(plan: Plan) -> bool:
    """Tell whether nothing but the order of additions differs from the plain step, in fp32 throughout."""
    sharding = plan.levers.sharding
    is_reduced = sharding is not None and (sharding.param_dtype or sharding.reduce_dtype) is not None
    others = [use for use in plan.uses if use.numerics != "exact" and use.name not in (SHARDING, MICROBATCHES)]
    return plan.levers.precision == "32-true" and not is_reduced and not others


def _is_bitwise(levers: Levers, plan: Plan, batch_size: int) -> bool:
    """Tell whether ranks are bitwise one process that adds up their gradients.

    Two are, where each sends the sum of its microbatches: a sum of two has one order.
    """
    sharding = levers.sharding
    assert sharding is not None
    is_sent_once = sharding.reduces == "last" or levers.microbatch_size >= -(-batch_size // sharding.world_size)
    return sharding.world_size == 2 and is_sent_once and _only_reorders(plan)


def _notes(plan: Plan) -> list[str]:
    assert plan.levers.sharding is not None
    ranks = plan.levers.sharding.world_size
    return [f"the plain step runs in one process, and adds up the gradients of the parts of {ranks} ranks"]


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

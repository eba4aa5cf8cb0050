"""The ladder: levers climbed one on top of the other in the advised order, each measured on the machine at hand.

A rung is kept where it pays: where the budget is given, by letting the step fit it, or by more samples a second at the
largest batch that fits; otherwise by a peak times step time that is less by `PAYS`. The time is that of the rung and
the one before it run in turn.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from msgspec.structs import replace as with_fields
from torch.utils.benchmark import Timer

from memfit.apply.lean import is_lean
from memfit.batch import map_tensors
from memfit.capture.fake import nothing_changes, real_copy
from memfit.capture.measure import measure_peak_bytes
from memfit.devices.advice import precisions
from memfit.devices.host import find_device
from memfit.errors import (
    CaptureError,
    MemfitError,
    MissingExtraError,
    PlanError,
    RecomputationError,
    UsageError,
    WorkloadError,
)
from memfit.ir import combinations
from memfit.ir.ladder import Ladder, Outcome, Rung
from memfit.ir.plan import NUMERICS, Levers, Numerics, OptimizerLever, Prediction
from memfit.ir.remat import Regions
from memfit.ir.trace import Trace
from memfit.pipeline import chunking, leaning
from memfit.pipeline.applying import applied, check_workload
from memfit.pipeline.classes import OPTIMIZER_CLASSES, allows, freest, lever_classes
from memfit.pipeline.combining import check_combination
from memfit.pipeline.coupling import coupling
from memfit.pipeline.predicting import Progress, capture_levers, costs_of, predict, silent
from memfit.pipeline.searching import microbatch_sizes
from memfit.report.cells import stages, with_bars
from memfit.solve.candidates import options
from memfit.solve.frontier import Combination
from memfit.solve.problem import build
from memfit.train.step import Step
from memfit.units import Budget, read_budget
from memfit.version import __version__
from memfit.workload import Workload, fingerprint, samples_of

PAYS = 0.02
"""By how much a rung must be better to be kept."""
_ROUNDS = 5  # in which two steps are timed in turn
_SOLVE_SECONDS = 0.5  # for each choice of what to checkpoint: within a few percent of the best
_NO_GPU = "nothing to copy to: it waits in host memory what a GPU need not hold, and this ladder is measured on the CPU"


@with_bars(stages)
def ladder(
    workload: Workload,
    *,
    budget: int | float | str | None = None,
    numerics: Numerics = "reduced",
    min_run_seconds: float = 2.0,
    progress: Progress = silent,
) -> Ladder:
    """Climb the advised levers one by one, and measure what each buys on top of those that paid.

    Args:
        workload: The user's workload, on the CPU; nothing of it is changed.
        budget: What the step may take: bytes, a string with a unit ("1.5GiB"), or a share of the machine's memory
            ("90%") or of the plain step's peak ("0.5x"). None for what the plain step takes.
        numerics: How far the numbers may change: "exact", "reordered", "reduced" or "changed", with which a
            lighter structure is proposed too.
        min_run_seconds: How long each step is timed for, at least (> 0).
        progress: Told how far it is; by default bars in a notebook, and nobody elsewhere.

    Raises:
        BudgetError: The budget says no number of bytes.
        UsageError: Another argument is not one.
        WorkloadError: The model is not on the CPU, or holds no data.
        CaptureError: The step can't be captured.
    """
    device = find_device("cpu")
    asked = None if budget is None else read_budget(budget)
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    if not min_run_seconds > 0:
        raise UsageError(f"min_run_seconds={min_run_seconds} is not above 0: give seconds to time each step for")
    if any(p.device.type != "cpu" for p in workload.model.parameters()):
        raise WorkloadError("Workload.model is not on the CPU, or holds no data: this version measures on the CPU only")
    check_workload(workload, device)
    climb = _Climb(workload, asked, numerics, min_run_seconds)
    with nothing_changes(workload):
        rungs = climb.rungs(progress)
    return Ladder(
        memfit_version=__version__,
        torch_version=str(torch.__version__),
        workload=workload.name,
        fingerprint=fingerprint(workload),
        device=device.name,
        threads=torch.get_num_threads(),
        batch_size=climb.batch_size,
        budget_bytes=climb.budget_bytes or 0,
        is_budget_given=asked is not None,
        allowed=numerics,
        rungs=rungs,
    )


class _NotAvailable(Exception):
    """A rung can't be had; says why."""


@dataclass
class _Climb:
    workload: Workload
    budget: Budget | None
    numerics: Numerics
    min_run_seconds: float

    def __post_init__(self) -> None:
        self.device = find_device("cpu")
        self.is_budget_given = self.budget is not None
        self.budget_bytes: int | None = None
        self.batch_size = samples_of(self.workload)
        self.plain = Levers(microbatch_size=self.batch_size)
        self.traces: dict[Levers, Trace] = {}
        self.coupling = coupling(self.trace(self.plain), self.workload)

    def rungs(self, progress: Progress) -> list[Rung]:
        """Climb."""
        total = len(_RUNGS) + 2
        progress("rungs", 0, total)
        rungs = [self._measured("plain", self.plain, "the step as it is", None)]
        for index, (name, propose) in enumerate(_RUNGS.items()):
            progress("rungs", index + 1, total)
            rungs.append(self._rung(name, propose, next(rung for rung in reversed(rungs) if rung.outcome == "kept")))
        rungs.append(self._structure(rungs[0]))
        progress("rungs", total, total)
        return rungs

    def _rung(self, name: str, propose: _Propose, before: Rung) -> Rung:
        assert before.levers is not None
        try:
            levers, what = propose(self, before.levers)
            numerics = self.numerics_of(levers)
            check_combination(levers, self.workload, self.device, allowed=self.numerics)
            if not allows(self.numerics, numerics):
                raise _NotAvailable(f"of class {numerics}: numerics={numerics!r} allows it")
            return self._measured(name, levers, what, before)
        except _NotAvailable as e:
            return Rung(name=name, outcome="not available", why=str(e))
        except (PlanError, MissingExtraError) as e:
            return Rung(name=name, outcome="not available", why=str(e).partition(" The row in")[0])
        except (CaptureError, RecomputationError) as e:
            return Rung(name=name, outcome="not available", why=f"it can't be run: {e}")

    def _bytes_of(self, budget: Budget, plain_bytes: int) -> int:
        return budget.nbytes(device_bytes=self.device.usable_bytes, plain_bytes=plain_bytes)

    def _measured(self, name: str, levers: Levers, what: str, before: Rung | None) -> Rung:
        """Run the step with levers, in turn with the rung before."""
        with ExitStack() as stack:
            step = self._running(levers, stack)
            peak_bytes = measure_peak_bytes(step, step.workload.batch)
            peak_ratio: float | None = None
            step_ratio: float | None = None
            if before is None:
                seconds = timed([step], self.min_run_seconds)[0]
                self.budget_bytes = peak_bytes if self.budget is None else self._bytes_of(self.budget, peak_bytes)
            else:
                assert before.levers is not None
                assert before.peak_bytes is not None
                assert before.step_seconds is not None
                was, now = timed([self._running(before.levers, stack), step], self.min_run_seconds)
                peak_ratio, step_ratio = peak_bytes / before.peak_bytes, now / was
                seconds = before.step_seconds * step_ratio
        largest, per_second = self._at_largest_batch(levers, peak_bytes, seconds)
        rung = Rung(
            name=name,
            outcome="kept",
            why=what,
            levers=levers,
            numerics=self.numerics_of(levers),
            peak_bytes=peak_bytes,
            step_seconds=seconds,
            peak_ratio=peak_ratio,
            step_ratio=step_ratio,
            predicted_peak_bytes=self.predicted(levers).peak_bytes,
            largest_batch=largest,
            samples_per_second=per_second,
        )
        return rung if before is None else with_fields(rung, outcome=self._outcome(rung, before))

    def _running(self, levers: Levers, stack: ExitStack) -> Step:
        step = stack.enter_context(applied(levers, real_copy(self.workload)))
        step(step.workload.batch)  # makes the optimizer's state
        return step

    def _outcome(self, rung: Rung, before: Rung) -> Outcome:
        return "kept" if pays(rung, before, self.budget_bytes if self.is_budget_given else None) else "does not pay"

    def _at_largest_batch(self, levers: Levers, peak_bytes: int, seconds: float) -> tuple[int | None, float]:
        """Return the samples that fit the budget together, and how many a second, from captures at two batch sizes."""
        assert self.budget_bytes is not None
        if levers.microbatch_size < self.batch_size:
            return None, self.batch_size / seconds if peak_bytes <= self.budget_bytes else 0.0
        other = max(1, self.batch_size // 2) if self.batch_size > 1 else 2
        here, there = self.predicted(levers), self._predicted_at(levers, other)
        bytes_each = (here.peak_bytes - there.peak_bytes) / (self.batch_size - other)
        seconds_each = (here.step_seconds - there.step_seconds) / (self.batch_size - other)
        if bytes_each <= 0:
            return None, self.batch_size / seconds
        largest = math.floor(self.batch_size + (self.budget_bytes - peak_bytes) / bytes_each)
        if largest < 1:
            return 0, 0.0
        predicted = here.step_seconds + max(0.0, seconds_each) * (largest - self.batch_size)
        return largest, largest / (seconds * max(predicted / here.step_seconds, 1e-9))

    def _predicted_at(self, levers: Levers, size: int) -> Prediction:
        resized = replace(self.workload, batch=_of_size(self.workload.batch, size))
        trace = capture_levers(resized, with_fields(levers, microbatch_size=size), self.device)
        return predict(trace, costs_of([trace], self.device), self.device)[0]

    def _structure(self, plain: Rung) -> Rung:
        """Propose separable convolutions, held against the plain step."""
        name = "structure"
        if self.numerics != "changed":
            why = "of class changed: numerics='changed' proposes depthwise-separable convolutions"
            return Rung(name=name, outcome="not available", why=why)
        from memfit.structure import separable_convolutions  # fits weights, which others don't need

        try:
            found = separable_convolutions(self.workload, measure=True)
        except MemfitError as e:
            return Rung(name=name, outcome="not available", why=str(e))
        was, now = found.before, found.after
        assert now.measured_peak_bytes is not None and now.measured_step_seconds is not None
        assert was.measured_peak_bytes is not None and was.measured_step_seconds is not None
        return Rung(
            name=name,
            outcome="proposed",
            why=f"{len(found.changes)} separable convolutions, against the plain step; accuracy is yours to judge",
            numerics="changed",
            peak_bytes=now.measured_peak_bytes,
            step_seconds=now.measured_step_seconds,
            peak_ratio=now.measured_peak_bytes / was.measured_peak_bytes,
            step_ratio=now.measured_step_seconds / was.measured_step_seconds,
            predicted_peak_bytes=now.peak_bytes,
        )

    # What rungs are made of

    def trace(self, levers: Levers) -> Trace:
        """Return the capture of a step with levers."""
        if levers not in self.traces:
            self.traces[levers] = capture_levers(self.workload, levers, self.device)
        return self.traces[levers]

    def predicted(self, levers: Levers) -> Prediction:
        """Return what is predicted for a step with levers."""
        trace = self.trace(levers)
        return predict(trace, costs_of([trace], self.device), self.device)[0]

    def numerics_of(self, levers: Levers) -> Numerics:
        """Return the freest class of levers."""
        return freest(lever_classes(levers, self.batch_size, self.coupling is not None))

    def combination(self, levers: Levers) -> Combination:
        """Return the problem of what to checkpoint under levers."""
        regions = Regions(self.trace(levers))
        costs = costs_of([self.trace(levers)], self.device)
        found = options(regions, costs, set())
        if not found:
            raise _NotAvailable("the model has no modules whose recomputation saves anything")
        return Combination(levers, self.numerics_of(levers), build(regions, costs, found, 0))


def pays(rung: Rung, before: Rung, budget_bytes: int | None) -> bool:
    """Tell whether a rung pays, against the one before.

    Args:
        rung: Measured.
        before: Measured.
        budget_bytes: What the step may take, where the user said so.
    """
    assert rung.peak_ratio is not None
    assert rung.step_ratio is not None
    assert before.peak_bytes is not None
    if budget_bytes is None:
        return rung.peak_ratio * rung.step_ratio <= 1 - PAYS
    if before.peak_bytes > budget_bytes:
        return rung.peak_ratio <= 1 - PAYS
    return (rung.samples_per_second or 0.0) >= (1 + PAYS) * (before.samples_per_second or 0.0)


def timed(steps: Sequence[Step], min_run_seconds: float) -> list[float]:
    """Return the median time in seconds of each of some steps, run in turn in blocks of PyTorch's benchmark timer."""
    timers = [
        Timer("step(batch)", globals={"step": step, "batch": step.workload.batch}, num_threads=torch.get_num_threads())
        for step in steps
    ]
    rounds = [
        [timer.blocked_autorange(min_run_time=min_run_seconds / _ROUNDS).median for timer in timers]
        for _ in range(_ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _of_size(batch: object, size: int) -> object:
    """Return a batch of as many samples, its own one after the other, each tensor of its own."""

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf] * -(-size // len(leaf)))[:size].clone()

    return map_tensors(resized, batch)


# The rungs: what each adds to the levers before it, and in words; or why it can't be had

_Propose = Callable[[_Climb, Levers], tuple[Levers, str]]


def _precision(climb: _Climb, levers: Levers) -> tuple[Levers, str]:
    chosen = precisions(climb.device)[-1]
    return with_fields(levers, precision=chosen), chosen


def _chunked_loss(climb: _Climb, levers: Levers) -> tuple[Levers, str]:
    plain = climb.trace(climb.plain)
    found = chunking.worthwhile(climb.workload, plain, climb.predicted(climb.plain).peak_bytes)
    if found is None:
        share = f"{chunking.LEAST_SHARE:.0%}"
        raise _NotAvailable(f"the loss takes no logits of {share} of the peak that a linear layer makes")
    chunked = with_fields(levers, chunked_loss=found)
    if not chunking.is_chunked(climb.trace(with_fields(climb.plain, chunked_loss=found)), plain, found):
        raise _NotAvailable(f"something else than F.cross_entropy asks for the logits of {found.head}")
    return chunked, f"{found.rows} rows of {found.head} at a time"


def _lean(climb: _Climb, levers: Levers) -> tuple[Levers, str]:
    if not leaning.worthwhile(climb.workload, climb.trace(climb.plain), climb.predicted(climb.plain).peak_bytes):
        raise _NotAvailable(f"norms, activations and dropouts keep less than {leaning.LEAST_SHARE:.0%} of the peak")
    count = sum(is_lean(module) for module in climb.workload.model.modules())
    return with_fields(levers, lean=("*",)), f"{count} modules made again"


def _checkpointed(climb: _Climb, levers: Levers, whole: bool) -> tuple[Levers, str]:
    """Checkpoint for the lowest peak; or as is fastest within the budget, halfway down where that is no bound."""
    bare = with_fields(levers, regions=())
    combination = climb.combination(bare)
    lowest = combination.leanest(_SOLVE_SECONDS)
    if whole:
        chosen = combination.candidate(lowest, lowest.peak_bytes).levers
    else:
        assert climb.budget_bytes is not None
        halfway = (combination.plain().peak_bytes + lowest.peak_bytes) // 2
        is_bound = climb.is_budget_given and lowest.peak_bytes <= climb.budget_bytes < combination.plain().peak_bytes
        found = combination.fastest(climb.budget_bytes if is_bound else halfway, 0.01, _SOLVE_SECONDS)
        chosen = bare if found is None else found.levers
    if not chosen.regions or chosen == levers:
        raise _NotAvailable("no choice of modules lowers the peak further")
    keeping = sum(bool(region.keep) for region in chosen.regions)
    return chosen, f"{len(chosen.regions)} regions, {keeping} of them keep operators"


def _microbatches(climb: _Climb, levers: Levers) -> tuple[Levers, str]:
    """Cut the batch as peak times time is predicted to be least."""
    sizes = microbatch_sizes(climb.batch_size)[1:]
    if not sizes:
        raise _NotAvailable("the batch is one sample")
    if climb.coupling is not None and climb.numerics != "changed":
        raise _NotAvailable(climb.coupling)
    if climb.numerics == "exact":
        raise _NotAvailable("of class reordered: numerics='reordered' allows it")

    def product(size: int) -> float:
        predicted = climb.predicted(with_fields(levers, microbatch_size=size))
        return predicted.peak_bytes * predicted.step_seconds

    best = min(sizes, key=product)
    return with_fields(levers, microbatch_size=best), f"{-(-climb.batch_size // best)} of {best} samples"


def _optimizer(climb: _Climb, levers: Levers, name: OptimizerLever) -> tuple[Levers, str]:
    return with_fields(levers, optimizer=name), name


def _offload(climb: _Climb, levers: Levers) -> tuple[Levers, str]:
    raise _NotAvailable(_NO_GPU)


_RUNGS: dict[str, _Propose] = {
    "precision": _precision,
    "chunked loss": _chunked_loss,
    "lean norms and activations": _lean,
    "selective checkpointing": functools.partial(_checkpointed, whole=False),
    "full checkpointing": functools.partial(_checkpointed, whole=True),
    "microbatches": _microbatches,
    **{combinations.OPTIMIZERS[name]: functools.partial(_optimizer, name=name) for name in OPTIMIZER_CLASSES},
    "offload": _offload,
}

"""The ladder: levers climbed one on top of the other in the advised order, each measured on the machine at hand.

A rung is kept where it pays: where the budget is given, by letting the step fit it, or by more samples a second at the
largest batch that fits; otherwise by a peak times step time that is less by `PAYS`. The time is that of the rung and
the one before it run in turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from msgspec.structs import replace as with_fields
from torch.utils.benchmark import Timer

from memfit.capture import measure_peak_bytes, nothing_changes, real_copy
from memfit.errors import (
    CaptureError,
    MemfitError,
    MissingExtraError,
    PlanError,
    RecomputationError,
    UsageError,
    WorkloadError,
)
from memfit.foundations import Budget, Progress, __version__, read_budget, silent
from memfit.hardware import find_device, precisions
from memfit.ir import (
    NUMERICS,
    CompilerLever,
    Device,
    Ladder,
    Levers,
    LeverUse,
    Numerics,
    Prediction,
    Regions,
    Rung,
    Sharding,
    Trace,
    allows,
    freest,
)
from memfit.levers import LeversOn, NotOffered, applied, check_combination, check_workload, lever_rungs, lever_uses
from memfit.levers import Rung as Offer
from memfit.pipeline import checked, device_named, verb
from memfit.planner import capture_levers, costs_of, coupling, predict
from memfit.report import stages, with_bars
from memfit.solver import Combination, build, options
from memfit.training import Step
from memfit.workload import Workload, fingerprint, map_tensors, samples_of

PAYS = 0.02
"""By how much a rung must be better to be kept."""
_ROUNDS = 5  # in which two steps are timed in turn


@checked
@with_bars(stages)
@verb
def ladder(
    workload: Workload,
    *,
    budget: int | float | str | None = None,
    device: str | torch.device | None = None,
    numerics: Numerics = "reduced",
    min_run_seconds: float = 2.0,
    progress: Progress = silent,
) -> Ladder:
    """Add the advised levers one by one, and measure the effect of each; those that pay are kept.

    Args:
        workload: The user's workload; nothing of it is changed.
        budget: What the step may take: bytes, a string with a unit ("1.5GiB"), or a share of the machine's memory
            ("90%") or of the plain step's peak ("0.5x"). None for what the plain step takes.
        device: A device of this machine, "cpu" or "cuda"; None for the one that the model is on. Copies run there.
        numerics: How far the numbers may change: "exact", "reordered", "reduced" or "changed", with which a
            lighter structure is proposed too.
        min_run_seconds: How long each step is timed for, at least (> 0).
        progress: Called with (stage, done, total); by default bars in a notebook, and nothing elsewhere.

    Raises:
        BudgetError: `budget` can't be parsed.
        UsageError: Another argument is not one.
        WorkloadError: The model is on another device, or holds no data.
        CaptureError: The step can't be captured.
    """
    found = find_device(device_named(device, workload))
    asked = None if budget is None else read_budget(budget)
    if numerics not in NUMERICS:
        raise UsageError(f"numerics={numerics!r} is unknown: use one of {', '.join(NUMERICS)}")
    if not min_run_seconds > 0:
        raise UsageError(f"min_run_seconds={min_run_seconds} is not above 0: give seconds to time each step for")
    if not found.is_here:
        raise UsageError(f"device={device!r} is not on this machine, and the ladder measures here: give cpu, or cuda")
    if any(p.device.type == "meta" for p in workload.model.parameters()):
        raise WorkloadError("Workload.model is on torch.device('meta') and has no data: build it on the CPU")
    check_workload(workload, found)
    climb = LadderClimb(workload, found, asked, numerics, min_run_seconds)
    with nothing_changes(workload) as around:
        rungs = climb.rungs(around.outside(progress))
    return Ladder(
        memfit_version=__version__,
        torch_version=str(torch.__version__),
        workload=workload.name,
        fingerprint=fingerprint(workload),
        device=found.name,
        threads=torch.get_num_threads(),
        batch_size=climb.batch_size,
        budget_bytes=climb.limit_bytes,
        is_budget_given=asked is not None,
        allowed=numerics,
        rungs=rungs,
    )


@dataclass
class LadderClimb:
    """The climb of one ladder. It is the `Setting` that levers are asked about."""

    workload: Workload
    device: Device
    budget: Budget | None
    numerics: Numerics
    min_run_seconds: float
    host_budget_bytes: int = 0

    def __post_init__(self) -> None:
        self.precisions = precisions(self.device)
        self.shardings: Sequence[Sharding] = ()
        self.compilers: Sequence[CompilerLever] = ()
        self.must_compile = self.tries_all = self.is_long = False
        self.budget_bytes: int | None = None  # in bytes once the plain step is measured; None where nobody said one
        self.limit_bytes = 0  # the budget, or what the plain step takes
        self.batch_size = samples_of(self.workload)
        self.plain = Levers(microbatch_size=self.batch_size)
        self.traces: dict[Levers, Trace] = {}
        self.coupling = coupling(self.trace(self.plain), self.workload)

    def rungs(self, progress: Progress) -> list[Rung]:
        offered = list(lever_rungs())
        total = len(offered) + 2
        progress("rungs", 0, total)
        rungs = [self._measured("plain", self.plain, "the plain step", None)]
        for index, (name, propose) in enumerate(offered):
            progress("rungs", index + 1, total)
            rungs.append(self._rung(name, propose, next(rung for rung in reversed(rungs) if rung.outcome == "kept")))
        rungs.append(self._structure(rungs[0]))
        progress("rungs", total, total)
        return rungs

    def _rung(self, name: str, propose: Offer, before: Rung) -> Rung:
        assert before.levers is not None
        try:
            levers, what = propose(self, before.levers)
            numerics = self.numerics_of(levers)
            check_combination(levers, self.workload, self.device, allowed=self.numerics)
            if not self.allows(levers):
                raise NotOffered(f"of class {numerics}: numerics={numerics!r} allows it")
            return self._measured(name, levers, what, before)
        except (NotOffered, PlanError, MissingExtraError) as e:
            why = str(e).partition(" The row in")[0]
        except (CaptureError, RecomputationError) as e:
            why = f"it can't be run: {e}"
        return Rung(name=name, outcome="not available", why=why)

    def _measured(self, name: str, levers: Levers, what: str, before: Rung | None) -> Rung:
        """Run the step with levers, in turn with the rung before."""
        with ExitStack() as stack:
            step = self._running(levers, stack)
            peak_bytes = measure_peak_bytes(step, step.workload.batch)
            peak_ratio = step_ratio = None
            if before is None:
                seconds = timed([step], self.min_run_seconds)[0]
                if self.budget is not None:
                    self.budget_bytes = self.budget.nbytes(
                        device_bytes=self.device.usable_bytes, plain_bytes=peak_bytes
                    )
                self.limit_bytes = self.budget_bytes or peak_bytes
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
        if before is None or pays(rung, before, self.budget_bytes):
            return rung
        return with_fields(rung, outcome="does not pay")

    def _running(self, levers: Levers, stack: ExitStack) -> Step:
        step = stack.enter_context(applied(levers, real_copy(self.workload, torch.device(self.device.name))))
        step(step.workload.batch)  # makes the optimizer's state
        return step

    def _at_largest_batch(self, levers: Levers, peak_bytes: int, seconds: float) -> tuple[int | None, float]:
        """Return the samples that fit the budget together, and how many a second, from captures at two batch sizes."""
        if levers.microbatch_size < self.batch_size:
            return None, self.batch_size / seconds if peak_bytes <= self.limit_bytes else 0.0
        other = max(1, self.batch_size // 2) if self.batch_size > 1 else 2

        def resized(leaf: torch.Tensor) -> torch.Tensor:  # the batch one after the other, in tensors of its own
            return torch.cat([leaf] * -(-other // len(leaf)))[:other].clone()

        smaller = replace(self.workload, batch=map_tensors(resized, self.workload.batch))
        trace = capture_levers(smaller, with_fields(levers, microbatch_size=other), self.device)
        here, there = self.predicted(levers), self._predict(trace)
        bytes_each = (here.peak_bytes - there.peak_bytes) / (self.batch_size - other)
        seconds_each = (here.step_seconds - there.step_seconds) / (self.batch_size - other)
        if bytes_each <= 0:
            return None, self.batch_size / seconds
        largest = math.floor(self.batch_size + (self.limit_bytes - peak_bytes) / bytes_each)
        if largest < 1:
            return 0, 0.0
        predicted = here.step_seconds + max(0.0, seconds_each) * (largest - self.batch_size)
        return largest, largest / (seconds * max(predicted / here.step_seconds, 1e-9))

    def _structure(self, plain: Rung) -> Rung:
        """Propose separable convolutions, held against the plain step."""
        if self.numerics != "changed":
            why = "of class changed: numerics='changed' proposes depthwise-separable convolutions"
            return Rung(name="structure", outcome="not available", why=why)
        from memfit.structure import separable_convolutions  # fits weights, which others don't need

        try:
            found = separable_convolutions(self.workload, device=self.device.name, measure=True)
        except MemfitError as e:
            return Rung(name="structure", outcome="not available", why=str(e))
        was, now = found.before, found.after
        assert now.measured_peak_bytes is not None and now.measured_step_seconds is not None
        assert was.measured_peak_bytes is not None and was.measured_step_seconds is not None
        return Rung(
            name="structure",
            outcome="proposed",
            why=(
                f"{len(found.changes)} separable convolutions, compared with the plain step; check the accuracy"
                " yourself"
            ),
            numerics="changed",
            peak_bytes=now.measured_peak_bytes,
            step_seconds=now.measured_step_seconds,
            peak_ratio=now.measured_peak_bytes / was.measured_peak_bytes,
            step_ratio=now.measured_step_seconds / was.measured_step_seconds,
            predicted_peak_bytes=now.peak_bytes,
        )

    # The parts of rungs

    def trace(self, levers: Levers) -> Trace:
        if levers not in self.traces:
            self.traces[levers] = capture_levers(self.workload, levers, self.device)
        return self.traces[levers]

    def _predict(self, trace: Trace) -> Prediction:
        return predict(trace, costs_of([trace], self.device), self.device)[0]

    def predicted(self, levers: Levers) -> Prediction:
        return self._predict(self.trace(levers))

    def module_seconds(self, levers: Levers) -> dict[str, float]:
        trace = self.trace(levers)
        return costs_of([trace], self.device).module_seconds(trace)

    def uses(self, levers: Levers) -> tuple[LeverUse, ...]:
        return lever_uses(LeversOn(levers, self.batch_size, self.coupling is not None))

    def numerics_of(self, levers: Levers) -> Numerics:
        return freest(self.uses(levers))

    def allows(self, levers: Levers) -> bool:
        return allows(self.numerics, self.numerics_of(levers))

    def combination(self, levers: Levers) -> Combination:
        regions = Regions(self.trace(levers))
        costs = costs_of([self.trace(levers)], self.device)
        choices = options(regions, costs, set())
        if not choices:
            raise NotOffered("recomputing the model's modules saves no memory")
        return Combination(levers, build(regions, costs, choices, 0), self.uses)


def pays(rung: Rung, before: Rung, budget_bytes: int | None) -> bool:
    """Tell whether a measured rung pays, against the one before and within the budget that the user gave, if any."""
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

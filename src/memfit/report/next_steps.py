"""The next steps after a plan and its run, each with the exact command, or the call where there was no command."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memfit.foundations import format_bytes
from memfit.ir import NUMERICS, Candidate, Numerics, Plan, RunRecord, Views, allows
from memfit.report.summary import beside_text, byte_unit, levers_text, microbatches, seconds_text, share_text

_SCALED = ("activations", "inputs", "temporaries", "workspaces")
_MUCH_WAITING, _MANY_SKIPS, _SLOW, _FALLING, _ROOM, _FASTER = 0.2, 0.02, 1.5, 0.01, 0.05, 0.95
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class NextStep(NamedTuple):
    """A recommended action: the reason, and its command or call ("" for none)."""

    why: str
    command: str = ""


def budget_argument(budget_bytes: int) -> str:
    """Return bytes as text for `budget=`, rounded up to a tenth of their unit."""
    unit, size = byte_unit(budget_bytes)
    return f"{math.ceil(10 * budget_bytes / size) / 10:g}{unit}"


def _upper_bytes(plan: Plan, point: Candidate) -> int:
    """Return a point's upper peak, which the budget limits; if missing, scaled by the plan's own."""
    if point.peak_upper_bytes is not None:
        return point.peak_upper_bytes
    return math.ceil(point.peak_bytes * plan.predicted.peak_upper_bytes / max(1, plan.predicted.peak_bytes))


@dataclass(frozen=True)
class Report:
    """The data of a report.

    Args:
        views: Its timelines before and after, its modules, and the comparison of both steps if there is one.
        metrics: A line for each step of the run, with the keys step, loss, grad_norm, skipped, loss_scale,
            seconds and peak_bytes, of which any but step may be missing or None. A line without a key, as
            that of an evaluation, is no gap in the curve; one with None is.
        folder: The run's folder, which commands name and whose checkpoints are named; None where it is not known.
    """

    plan: Plan
    views: Views
    run: RunRecord | None = None
    metrics: Sequence[dict[str, Any]] = ()
    folder: Path | None = None

    def next_steps(self) -> list[NextStep]:
        """Return the recommended actions, the most urgent first."""
        return [*self._repairs(), *self._gains()]

    def _train(self, steps: int | None = None, *more: str) -> str:
        """Return the command or the call that continues a run."""
        run, out = self.run, str(self.folder or "runs/mine")
        if run is None or not run.command:
            keywords = "".join(f", {word.removeprefix('--').replace('-', '_')}" for word in more)
            return f"memfit.train(plan, workload, out={out!r}, steps={steps or '...'}, resume=True{keywords})"
        dropped = ("--overwrite", "--resume", *(("--steps", "--epochs") if steps else ()))
        words, is_value = ["memfit"], False
        for word in run.command:
            if not is_value and word.partition("=")[0] not in dropped:
                words.append(word)
            is_value = word in dropped and word in ("--steps", "--epochs")
        return shlex.join([*words, *(["--steps", str(steps)] if steps else []), *more, "--resume"])

    def _workload_name(self) -> str:
        """Return the workload's name in the run's command; "" without a command."""
        words = self.run.command if self.run else []
        return next((word for word in words if re.fullmatch(r"[^-].*:\w+", word)), "")

    def _plan(self, budget_bytes: int, numerics: Numerics | None = None) -> str:
        """Return the command or the call that makes a plan for another budget or another class."""
        plan, budget = self.plan, budget_argument(budget_bytes)
        numerics = numerics or plan.allowed
        if name := self._workload_name():
            words = ["memfit", "plan", name, "--device", plan.device, "--budget", budget]
            return shlex.join([*words, "--numerics", numerics, "-o", "plan.json"])
        return f"plan = memfit.plan(workload, device={plan.device!r}, budget={budget!r}, numerics={numerics!r})"

    def _measured(self) -> int | None:
        peaks = [self.run.measured_peak_bytes if self.run else None]
        peaks.append(self.views.comparison.planned_peak_bytes if self.views.comparison else None)
        return max((count for count in peaks if count is not None), default=None)

    def _repairs(self) -> Iterator[NextStep]:
        """Recommend what to do about a run that ended early, memory that does not suffice, and lost time."""
        plan, run = self.plan, self.run
        if run is not None and run.status != "finished":
            failed = run.status == "failed"
            state = "The run failed" if failed else "At the time of this report the run was still going,"
            at = f"{state} after step {run.steps:,}."
            files = self.folder.iterdir() if self.folder is not None and self.folder.is_dir() else ()
            saved = sorted(int(match[1]) for path in files if (match := _CHECKPOINT.fullmatch(path.name)))
            if saved:
                unless = "" if failed else " If it no longer runs, resume from there."
                yield NextStep(f"{at} Its newest checkpoint is from step {saved[-1]:,}.{unless}", self._train())
            elif failed:
                yield NextStep(f"{at} It has no checkpoint: start again, with --checkpoint-every (checkpoint_every=).")

        upper, budget, measured = plan.predicted.peak_upper_bytes, plan.budget_bytes, self._measured()
        if measured is not None and measured > budget:
            over = format_bytes(measured - budget)
            why = f"The measured peak of {format_bytes(measured)} is {over} over the budget: plan with a lower one."
            yield NextStep(why, self._plan(int(budget * budget / measured)))
        elif upper > budget:
            why = f"The plan may need up to {format_bytes(upper)}, {format_bytes(upper - budget)} over the budget."
            yield NextStep(f"{why} The smallest budget that surely fits:", self._plan(upper))

        # The budget of the next leaner point of the frontier; without one, a tenth less.
        allowed = [c for c in plan.frontier if allows(plan.allowed, c.numerics)]
        leaner = [_upper_bytes(plan, c) for c in allowed if c.peak_bytes < 0.98 * plan.predicted.peak_bytes]
        leaner_budget = max(leaner, default=int(0.9 * budget))
        lost = [event for event in run.events if event.kind == "out of memory"] if run else []
        if lost:
            times = f"{len(lost):,} time{'s' * (len(lost) != 1)}, last after step {lost[-1].step:,}"
            why = f"The run ran out of memory {times}, and continued with a smaller plan."
            yield NextStep(f"{why} Start with a smaller plan:", self._plan(leaner_budget))
        if retries := run.allocation_retries if run else None:
            why = (
                f"The GPU's allocator found no room {retries:,} time{'s' * (retries != 1)} and emptied its cache. Each"
                " time stops the GPU, and the next may run out of memory. Plan with a lower budget."
            )
            yield NextStep(why, self._plan(leaner_budget))

        lines = [line for line in self.metrics if "skipped" in line]
        skipped = sum(bool(line["skipped"]) for line in lines)
        scale = next((line["loss_scale"] for line in reversed(lines) if line.get("loss_scale")), None)
        if skipped > _MANY_SKIPS * len(lines) and scale:
            why = (
                f"{skipped:,} of {len(lines):,} steps had no update, because their gradients overflowed. The loss scale"
                f" is now {scale:g}: start with it."
            )
            yield NextStep(why, f"memfit.Workload(..., loss_scaling=memfit.LossScaling(initial={scale:g}))")
        if run is not None and run.data_share is not None and run.data_share >= _MUCH_WAITING:
            option = "--prefetch-batches=2" if run.command else "prefetch_batches=2"
            why = (
                f"Steps waited for data {share_text(run.data_share, 1)} of the time. Make batches while steps run:"
                f" DataLoader(num_workers=...) or {option}."
            )
            yield NextStep(why, "" if run.status == "finished" else self._train(None, option))
        predicted = plan.predicted.step_seconds
        if run is not None and run.step_seconds is not None and run.step_seconds > _SLOW * predicted > 0:
            speed = beside_text(run.step_seconds, predicted, "predicted")
            why = (
                f"A step took {seconds_text(run.step_seconds)}, {speed}:"
                " other programs used the machine, or the step does work outside PyTorch's operators."
                " Compare it with the plain step:"
            )
            yield NextStep(why, "memfit.verify(plan, workload, steps=10)")

    def _gains(self) -> Iterator[NextStep]:
        """Recommend faster steps, a larger batch, more of them, and a check."""
        plan, ours, run, measured = self.plan, self.plan.predicted, self.run, self._measured()
        faster = [c for c in plan.frontier if c.step_seconds < _FASTER * ours.step_seconds]
        allowed = [c for c in faster if allows(plan.allowed, c.numerics)]
        best = min(allowed, key=lambda c: c.held_bytes, default=None)
        if best is not None and (upper := _upper_bytes(plan, best)) > plan.budget_bytes:
            gain = share_text(ours.step_seconds - best.step_seconds, ours.step_seconds)
            more = f"With {format_bytes(upper - plan.budget_bytes)} more memory a step takes {gain} less time"
            if measured is not None and measured < (1 - _ROOM) * plan.budget_bytes:
                more += f"; the run left {format_bytes(plan.budget_bytes - measured)} of the budget free"
            yield NextStep(f"{more}.", self._plan(upper))

        room = plan.budget_bytes - ours.peak_upper_bytes
        scaled = sum(ours.by_category.get(name, 0) for name in _SCALED)
        if microbatches(plan) <= 1 and room >= _ROOM * plan.budget_bytes and scaled:
            batch = int(plan.batch_size * (1 + room / (scaled * (ours.peak_upper_bytes / max(1, ours.peak_bytes)))))
            if batch > plan.batch_size:
                why = (
                    f"{format_bytes(room)} of the budget are free. A batch of about {batch:,} fits in place of"
                    f" {plan.batch_size:,}: one more sample needs {format_bytes(scaled / plan.batch_size)}. Give"
                    " Workload.batch that many samples, and plan again."
                )
                yield NextStep(why, self._plan(plan.budget_bytes))

        # The strictest class beyond the allowed one that saves time within the budget.
        freer = [c for c in faster if c not in allowed and _upper_bytes(plan, c) <= plan.budget_bytes]
        best = min(freer, key=lambda c: (NUMERICS.index(c.numerics), c.step_seconds), default=None)
        if best is not None:
            speed = beside_text(best.step_seconds, ours.step_seconds, "this plan")
            why = (
                f"If your training allows numerics class {best.numerics} ({levers_text(best)}), a step takes about"
                f" {seconds_text(best.step_seconds)}, {speed}."
            )
            yield NextStep(why, self._plan(plan.budget_bytes, best.numerics))

        losses = [line["loss"] for line in self.metrics if line.get("loss") is not None]
        part = len(losses) // 10
        if run is not None and run.status == "finished" and part >= 5:
            before, last = (statistics.fmean(some) for some in (losses[-2 * part : -part], losses[-part:]))
            if before > 0 and last < (1 - _FALLING) * before:
                fell = f"by {share_text(before - last, before)} over the last tenth of the run"
                why = f"The loss was still falling at the end, {fell}: train for more steps."
                yield NextStep(why, self._train(run.steps + run.steps // 2))
        if self.views.comparison is None and plan.device == "cpu":
            name, command = self._workload_name(), "memfit.verify(plan, workload)"
            if name and self.folder is not None:
                command = shlex.join(["memfit", "verify", name, "--plan", str(self.folder / "plan.json")])
            yield NextStep(f"This plan of class {plan.numerics} was not compared with the plain step yet.", command)

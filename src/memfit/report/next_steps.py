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
from memfit.report.summary import beside_text, levers_text, microbatches, seconds_text, share_text

_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_SCALED = ("activations", "inputs", "temporaries", "workspaces")
_MUCH_WAITING, _MANY_SKIPS, _SLOW, _FALLING, _ROOM, _FASTER = 0.2, 0.02, 1.5, 0.01, 0.05, 0.95
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class NextStep(NamedTuple):
    """A recommended action: the reason, and its command or call ("" for none)."""

    why: str
    command: str = ""


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


def next_steps(report: Report) -> list[NextStep]:
    """Return the recommended actions, the most urgent first."""
    return [*_repairs(report), *_gains(report)]


def budget_argument(budget_bytes: int) -> str:
    """Return bytes as text for `budget=`, rounded up to a tenth of their unit."""
    unit, size = next((name, size) for name, size in _UNITS if budget_bytes >= size or size == 1)
    return f"{math.ceil(10 * budget_bytes / size) / 10:g}{unit}"


def _train(report: Report, steps: int | None = None, *more: str) -> str:
    """Return the command or the call that continues a run."""
    run, out = report.run, str(report.folder or "runs/mine")
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


def _workload_name(report: Report) -> str:
    """Return the workload's name in the run's command; "" without a command."""
    words = report.run.command if report.run else []
    return next((word for word in words if re.fullmatch(r"[^-].*:\w+", word)), "")


def _plan(report: Report, budget_bytes: int, numerics: Numerics | None = None) -> str:
    """Return the command or the call that makes a plan for another budget or another class."""
    plan, budget = report.plan, budget_argument(budget_bytes)
    numerics = numerics or plan.allowed
    if name := _workload_name(report):
        words = ["memfit", "plan", name, "--device", plan.device, "--budget", budget]
        return shlex.join([*words, "--numerics", numerics, "-o", "plan.json"])
    return f"plan = memfit.plan(workload, device={plan.device!r}, budget={budget!r}, numerics={numerics!r})"


def _measured(report: Report) -> int | None:
    peaks = [report.run.measured_peak_bytes if report.run else None]
    peaks.append(report.views.comparison.planned_peak_bytes if report.views.comparison else None)
    return max((count for count in peaks if count is not None), default=None)


def _upper_bytes(plan: Plan, point: Candidate) -> int:
    """Return a point's upper peak, which the budget limits; if missing, scaled by the plan's own."""
    if point.peak_upper_bytes is not None:
        return point.peak_upper_bytes
    return math.ceil(point.peak_bytes * plan.predicted.peak_upper_bytes / max(1, plan.predicted.peak_bytes))


def _repairs(report: Report) -> Iterator[NextStep]:
    """Recommend what to do about a run that ended early, memory that does not suffice, and lost time."""
    plan, run = report.plan, report.run
    if run is not None and run.status != "finished":
        state = "The run failed" if run.status == "failed" else "At the time of this report the run was still going,"
        at = f"{state} after step {run.steps:,}."
        files = report.folder.iterdir() if report.folder is not None and report.folder.is_dir() else ()
        saved = sorted(int(match[1]) for path in files if (match := _CHECKPOINT.fullmatch(path.name)))
        if saved:
            unless = "" if run.status == "failed" else " If it no longer runs, resume from there."
            yield NextStep(f"{at} Its newest checkpoint is from step {saved[-1]:,}.{unless}", _train(report))
        elif run.status == "failed":
            yield NextStep(f"{at} It has no checkpoint: start again, with --checkpoint-every (checkpoint_every=).")

    upper, budget, measured = plan.predicted.peak_upper_bytes, plan.budget_bytes, _measured(report)
    if measured is not None and measured > budget:
        over = format_bytes(measured - budget)
        why = f"The measured peak of {format_bytes(measured)} is {over} over the budget: plan with a lower one."
        yield NextStep(why, _plan(report, int(budget * budget / measured)))
    elif upper > budget:
        why = f"The plan may need up to {format_bytes(upper)}, {format_bytes(upper - budget)} over the budget."
        yield NextStep(f"{why} The smallest budget that surely fits:", _plan(report, upper))

    # The budget of the next leaner point of the frontier; without one, a tenth less.
    allowed = [c for c in plan.frontier if allows(plan.allowed, c.numerics)]
    leaner = [_upper_bytes(plan, c) for c in allowed if c.peak_bytes < 0.98 * plan.predicted.peak_bytes]
    leaner_budget = max(leaner, default=int(0.9 * budget))
    lost = [event for event in run.events if event.kind == "out of memory"] if run else []
    if lost:
        times = f"{len(lost):,} time{'s' * (len(lost) != 1)}, last after step {lost[-1].step:,}"
        why = f"The run ran out of memory {times}, and continued with a smaller plan."
        yield NextStep(f"{why} Start with a smaller plan:", _plan(report, leaner_budget))
    if retries := run.allocation_retries if run else None:
        why = (
            f"The GPU's allocator found no room {retries:,} time{'s' * (retries != 1)} and emptied its cache. Each"
            " time stops the GPU, and the next may run out of memory. Plan with a lower budget."
        )
        yield NextStep(why, _plan(report, leaner_budget))

    lines = [line for line in report.metrics if "skipped" in line]
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
        yield NextStep(why, "" if run.status == "finished" else _train(report, None, option))
    predicted = plan.predicted.step_seconds
    if run is not None and run.step_seconds is not None and run.step_seconds > _SLOW * predicted > 0:
        why = (
            f"A step took {seconds_text(run.step_seconds)}, {beside_text(run.step_seconds, predicted, 'predicted')}:"
            " other programs used the machine, or the step does work outside PyTorch's operators."
            " Compare it with the plain step:"
        )
        yield NextStep(why, "memfit.verify(plan, workload, steps=10)")


def _gains(report: Report) -> Iterator[NextStep]:
    """Recommend faster steps, a larger batch, more of them, and a check."""
    plan, ours, run, measured = report.plan, report.plan.predicted, report.run, _measured(report)
    faster = [c for c in plan.frontier if c.step_seconds < _FASTER * ours.step_seconds]
    allowed = [c for c in faster if allows(plan.allowed, c.numerics)]
    best = min(allowed, key=lambda c: c.held_bytes, default=None)
    if best is not None and (upper := _upper_bytes(plan, best)) > plan.budget_bytes:
        gain = share_text(ours.step_seconds - best.step_seconds, ours.step_seconds)
        more = f"With {format_bytes(upper - plan.budget_bytes)} more memory a step takes {gain} less time"
        if measured is not None and measured < (1 - _ROOM) * plan.budget_bytes:
            more += f"; the run left {format_bytes(plan.budget_bytes - measured)} of the budget free"
        yield NextStep(f"{more}.", _plan(report, upper))

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
            yield NextStep(why, _plan(report, plan.budget_bytes))

    # The strictest class beyond the allowed one that saves time within the budget.
    freer = [c for c in faster if c not in allowed and _upper_bytes(plan, c) <= plan.budget_bytes]
    best = min(freer, key=lambda c: (NUMERICS.index(c.numerics), c.step_seconds), default=None)
    if best is not None:
        speed = beside_text(best.step_seconds, ours.step_seconds, "this plan")
        step = f"{seconds_text(best.step_seconds)}, {speed}"
        why = (
            f"If your training allows numerics class {best.numerics} ({levers_text(best)}), a step takes about {step}."
        )
        yield NextStep(why, _plan(report, plan.budget_bytes, best.numerics))

    losses = [line["loss"] for line in report.metrics if line.get("loss") is not None]
    part = len(losses) // 10
    if run is not None and run.status == "finished" and part >= 5:
        before, last = (statistics.fmean(some) for some in (losses[-2 * part : -part], losses[-part:]))
        if before > 0 and last < (1 - _FALLING) * before:
            fell = f"by {share_text(before - last, before)} over the last tenth of the run"
            why = f"The loss was still falling at the end, {fell}: train for more steps."
            yield NextStep(why, _train(report, run.steps + run.steps // 2))
    if report.views.comparison is None and plan.device == "cpu":
        name, command = _workload_name(report), "memfit.verify(plan, workload)"
        if name and report.folder is not None:
            command = shlex.join(["memfit", "verify", name, "--plan", str(report.folder / "plan.json")])
        yield NextStep(f"This plan of class {plan.numerics} was not compared with the plain step yet.", command)

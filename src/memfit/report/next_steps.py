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
from memfit.report.summary import levers_text, microbatches, seconds_text, share_text
from memfit.report.verdict import beside_text

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
        metrics: A line for each step, as for `render`.
    """

    plan: Plan
    views: Views
    run: RunRecord | None = None
    metrics: Sequence[dict[str, Any]] = ()
    folder: Path | None = None


def next_steps(report: Report) -> list[NextStep]:
    """Return the recommended actions, the most urgent first."""
    steps = [*_go_on(report), *_fit(report.plan, report), *_retried(report), *_skipped(report), *_waited(report)]
    steps += [*_slow(report), *_faster(report), *_larger_batch(report), *_freer(report), *_train_on(report)]
    return [*steps, *_verify(report)]


# Commands


def _train(report: Report, steps: int | None = None, *more: str) -> str:
    """Return the command or the call that continues a run."""
    run, out = report.run, str(report.folder or "runs/mine")
    if run is not None and run.command:
        words = _without(run.command, "--overwrite", "--resume", *(["--steps", "--epochs"] if steps else []))
        return shlex.join(["memfit", *words, *(["--steps", str(steps)] if steps else []), *more, "--resume"])
    keywords = "".join(f", {word.removeprefix('--').replace('-', '_')}" for word in more)
    return f"memfit.train(plan, workload, out={out!r}, steps={steps or '...'}, resume=True{keywords})"


def _workload_name(report: Report) -> str:
    """Return the workload's name in the run's command; "" without a command."""
    words = report.run.command if report.run else []
    return next((word for word in words if re.fullmatch(r"[^-].*:\w+", word)), "")


def _without(words: Sequence[str], *options: str) -> list[str]:
    """Return the words of a command without some options and their values."""
    remaining: list[str] = []
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] not in options:
            remaining.append(word)
        skip = word in options and word in ("--steps", "--epochs")
    return remaining


def _plan(report: Report, budget_bytes: int, numerics: Numerics | None = None) -> str:
    """Return the command or the call that makes a plan for another budget or another class."""
    plan, budget = report.plan, budget_argument(budget_bytes)
    numerics = numerics or plan.allowed
    if name := _workload_name(report):
        words = ["memfit", "plan", name, "--device", plan.device, "--budget", budget]
        return shlex.join([*words, "--numerics", numerics, "-o", "plan.json"])
    return f"plan = memfit.plan(workload, device={plan.device!r}, budget={budget!r}, numerics={numerics!r})"


def budget_argument(budget_bytes: int) -> str:
    """Return bytes as text for `budget=`, rounded up to a tenth of their unit."""
    unit, size = next((name, size) for name, size in _UNITS if budget_bytes >= size or size == 1)
    return f"{math.ceil(10 * budget_bytes / size) / 10:g}{unit}"


# Recommendations


def _go_on(report: Report) -> Iterator[NextStep]:
    """Recommend how to continue a run that failed or was stopped."""
    run = report.run
    if run is None or run.status == "finished":
        return
    state = "The run failed" if run.status == "failed" else "At the time of this report the run was still going,"
    at = f"{state} after step {run.steps:,}."
    saved = sorted(int(match[1]) for path in _entries(report.folder) if (match := _CHECKPOINT.fullmatch(path.name)))
    if saved:
        unless = "" if run.status == "failed" else " If it no longer runs, resume from there."
        yield NextStep(f"{at} Its newest checkpoint is from step {saved[-1]:,}.{unless}", _train(report))
    elif run.status == "failed":
        yield NextStep(f"{at} It has no checkpoint: start again, with --checkpoint-every (checkpoint_every=).")


def _entries(folder: Path | None) -> list[Path]:
    return list(folder.iterdir()) if folder is not None and folder.is_dir() else []


def _fit(plan: Plan, report: Report) -> Iterator[NextStep]:
    """Recommend a lower budget where the plan may not fit, or did not."""
    upper, budget, measured = plan.predicted.peak_upper_bytes, plan.budget_bytes, _measured(report)
    if measured is not None and measured > budget:
        over = format_bytes(measured - budget)
        why = f"The measured peak of {format_bytes(measured)} is {over} over the budget: plan with a lower one."
        yield NextStep(why, _plan(report, int(budget * budget / measured)))
    elif upper > budget:
        why = f"The plan may need up to {format_bytes(upper)}, {format_bytes(upper - budget)} over the budget."
        yield NextStep(f"{why} The smallest budget that surely fits:", _plan(report, upper))
    lost = [event for event in report.run.events if event.kind == "out of memory"] if report.run else []
    if lost:
        times = f"{len(lost):,} time{'s' * (len(lost) != 1)}"
        why = (
            f"The run ran out of memory {times}, last after step {lost[-1].step:,}, and continued with a smaller plan."
        )
        yield NextStep(f"{why} Start with a smaller plan:", _plan(report, _leaner_budget(plan)))


def _measured(report: Report) -> int | None:
    """Return the largest measured peak of the planned step."""
    peaks = [report.run.measured_peak_bytes if report.run else None]
    peaks.append(report.views.comparison.planned_peak_bytes if report.views.comparison else None)
    return max((count for count in peaks if count is not None), default=None)


def _retried(report: Report) -> Iterator[NextStep]:
    retries = report.run.allocation_retries if report.run else None
    if retries:
        why = (
            f"The GPU's allocator found no room {retries:,} time{'s' * (retries != 1)} and emptied its cache. Each"
            " time stops the GPU, and the next may run out of memory. Plan with a lower budget."
        )
        yield NextStep(why, _plan(report, _leaner_budget(report.plan)))


def _leaner_budget(plan: Plan) -> int:
    """Return the budget of the next leaner point of the frontier; without one, a tenth less."""
    ours = plan.predicted.peak_bytes
    leaner = [c for c in plan.frontier if allows(plan.allowed, c.numerics) and c.peak_bytes < 0.98 * ours]
    return max((_upper_bytes(plan, c) for c in leaner), default=int(0.9 * plan.budget_bytes))


def _upper_bytes(plan: Plan, point: Candidate) -> int:
    """Return a point's upper peak, which the budget limits; if missing, scaled by the plan's own."""
    if point.peak_upper_bytes is not None:
        return point.peak_upper_bytes
    return math.ceil(point.peak_bytes * plan.predicted.peak_upper_bytes / max(1, plan.predicted.peak_bytes))


def _skipped(report: Report) -> Iterator[NextStep]:
    lines = [line for line in report.metrics if "skipped" in line]
    skipped = sum(bool(line["skipped"]) for line in lines)
    scale = next((line["loss_scale"] for line in reversed(lines) if line.get("loss_scale")), None)
    if skipped > _MANY_SKIPS * len(lines) and scale:
        why = (
            f"{skipped:,} of {len(lines):,} steps had no update, because their gradients overflowed. The loss scale"
            f" is now {scale:g}: start with it."
        )
        yield NextStep(why, f"memfit.Workload(..., loss_scaling=memfit.LossScaling(initial={scale:g}))")


def _waited(report: Report) -> Iterator[NextStep]:
    run = report.run
    if run is not None and run.data_share is not None and run.data_share >= _MUCH_WAITING:
        option = "--prefetch-batches=2" if run.command else "prefetch_batches=2"
        why = (
            f"Steps waited for data {share_text(run.data_share, 1)} of the time. Make batches while steps run:"
            f" DataLoader(num_workers=...) or {option}."
        )
        yield NextStep(why, "" if run.status == "finished" else _train(report, None, option))


def _slow(report: Report) -> Iterator[NextStep]:
    """Recommend a comparison where steps take much longer than predicted."""
    predicted, run = report.plan.predicted.step_seconds, report.run
    if run is not None and run.step_seconds is not None and run.step_seconds > _SLOW * predicted > 0:
        why = (
            f"A step took {seconds_text(run.step_seconds)}, {beside_text(run.step_seconds, predicted, 'predicted')}:"
            " other programs used the machine, or the step does work outside PyTorch's operators."
            " Compare it with the plain step:"
        )
        yield NextStep(why, "memfit.verify(plan, workload, steps=10)")


def _faster(report: Report) -> Iterator[NextStep]:
    """Recommend the next faster point of the frontier, with its budget."""
    plan = report.plan
    ours = plan.predicted
    faster = [
        c for c in plan.frontier if allows(plan.allowed, c.numerics) and c.step_seconds < _FASTER * ours.step_seconds
    ]
    if not faster:
        return
    best = min(faster, key=lambda c: c.held_bytes)
    upper, measured = _upper_bytes(plan, best), _measured(report)
    if upper <= plan.budget_bytes:
        return
    gain = share_text(ours.step_seconds - best.step_seconds, ours.step_seconds)
    more = f"With {format_bytes(upper - plan.budget_bytes)} more memory a step takes {gain} less time"
    if measured is not None and measured < (1 - _ROOM) * plan.budget_bytes:
        more += f"; the run left {format_bytes(plan.budget_bytes - measured)} of the budget free"
    yield NextStep(f"{more}.", _plan(report, upper))


def _larger_batch(report: Report) -> Iterator[NextStep]:
    """Recommend a larger batch that would fit, where the plan runs the batch as a whole."""
    plan = report.plan
    room = plan.budget_bytes - plan.predicted.peak_upper_bytes
    scaled = sum(plan.predicted.by_category.get(name, 0) for name in _SCALED)
    if microbatches(plan) > 1 or room < _ROOM * plan.budget_bytes or not scaled:
        return
    upper = plan.predicted.peak_upper_bytes / max(1, plan.predicted.peak_bytes)
    batch = int(plan.batch_size * (1 + room / (scaled * upper)))
    if batch > plan.batch_size:
        why = (
            f"{format_bytes(room)} of the budget are free. A batch of about {batch:,} fits in place of"
            f" {plan.batch_size:,}: one more sample needs {format_bytes(scaled / plan.batch_size)}. Give"
            " Workload.batch that many samples, and plan again."
        )
        yield NextStep(why, _plan(report, plan.budget_bytes))


def _freer(report: Report) -> Iterator[NextStep]:
    """Recommend the strictest class beyond the allowed one that saves time within the budget."""
    plan, ours = report.plan, report.plan.predicted
    for numerics in NUMERICS[NUMERICS.index(plan.allowed) + 1 :]:
        own = [c for c in plan.frontier if c.numerics == numerics and _upper_bytes(plan, c) <= plan.budget_bytes]
        best = min(own, key=lambda c: c.step_seconds, default=None)
        if best is not None and best.step_seconds < _FASTER * ours.step_seconds:
            step = (
                f"{seconds_text(best.step_seconds)}, {beside_text(best.step_seconds, ours.step_seconds, 'this plan')}"
            )
            why = f"If your training allows numerics class {numerics} ({levers_text(best)}), a step takes about {step}."
            yield NextStep(why, _plan(report, plan.budget_bytes, numerics))
            return


def _train_on(report: Report) -> Iterator[NextStep]:
    """Recommend to continue a finished run whose loss was still falling."""
    run = report.run
    losses = [line["loss"] for line in report.metrics if line.get("loss") is not None]
    part = len(losses) // 10
    if run is None or run.status != "finished" or part < 5:
        return
    before, last = (statistics.fmean(some) for some in (losses[-2 * part : -part], losses[-part:]))
    if before > 0 and last < (1 - _FALLING) * before:
        fell = share_text(before - last, before)
        why = f"The loss was still falling at the end, by {fell} over the last tenth of the run: train for more steps."
        yield NextStep(why, _train(report, run.steps + run.steps // 2))


def _verify(report: Report) -> Iterator[NextStep]:
    """Recommend `verify` where the plan was not measured beside the plain step."""
    plan, name = report.plan, _workload_name(report)
    if report.views.comparison is not None or plan.device != "cpu":
        return
    why = f"This plan of class {plan.numerics} was not compared with the plain step yet."
    if name and report.folder is not None:
        yield NextStep(why, shlex.join(["memfit", "verify", name, "--plan", str(report.folder / "plan.json")]))
    else:
        yield NextStep(why, "memfit.verify(plan, workload)")

"""Training with a progress bar."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memfit.cli.output import note, stages
from memfit.hardware import heap
from memfit.hardware.host import free_bytes
from memfit.ir.plan import Plan
from memfit.ir.run_record import RunRecord
from memfit.pipeline._train import trained
from memfit.ranks.environment import launched_size
from memfit.training.runs.folder import PLAN
from memfit.training.runs.log import RunOptions, StepRecord
from memfit.units import format_bytes, format_seconds, parse_budget
from memfit.workload import Workload


def train_with_bar(plan: Plan, workload: Workload, options: RunOptions) -> RunRecord:
    """Train with `memfit.train`, and show progress: loss, step time, and the last measured peak."""
    peak = ""
    total = options.steps if options.steps is not None else _steps_of(workload, options.epochs)
    is_prepared = False
    prepare = f"prepare, make code (about {format_seconds(plan.code_seconds)})" if plan.code_seconds else "prepare"
    with stages() as report:

        def compared(done: int, of: int) -> None:
            report("plain and planned", done, of)
            if done == of:
                report(prepare, 0, 1)

        def on_step(progress: StepRecord) -> None:
            nonlocal peak, is_prepared
            if not is_prepared:
                is_prepared = True
                report(prepare, 1, 1)
                report("train", progress.step - 1, total)
            if progress.peak_bytes is not None:
                peak = f", peak {format_bytes(progress.peak_bytes)}"
            note = f"loss {progress.loss:.4f}, {format_seconds(progress.seconds)} a step{peak}"
            report("train", progress.step, total, note)

        if not options.compare_steps:
            report(prepare, 0, 1)
        return trained(plan, workload, replace(options, progress=compared, on_step=on_step))


def plan_of(path: Path | None, folder: Path | None) -> Plan | None:
    """Load the plan from `path`, or else from the run that is resumed, if it was made for this number of ranks.

    Raises:
        PlanError: The file can't be read, or is not a plan.
    """
    if path is not None:
        return Plan.load(path)
    if folder is None or not (folder / PLAN).is_file():
        return None
    held = Plan.load(folder / PLAN)
    sharding = held.levers.sharding
    return held if launched_size() == (1 if sharding is None else sharding.world_size) else None


def settle_memory(plan: Plan, host_budget: str | None = None, *, runs_plain: bool = False) -> None:
    """Keep or return this process's freed memory (`heap.settle`), and tell the user where it is slower.

    Args:
        plan: The plan to run; call this before any large allocation.
        host_budget: The run's host budget, as given by the user; None for the host's free memory.
        runs_plain: Whether the plain step runs too.

    Raises:
        BudgetError: `host_budget` can't be parsed.
    """
    if plan.device != "cpu":
        return
    free = free_bytes()
    room = free if host_budget is None else min(free, parse_budget(host_budget, free, "host_budget"))
    peak_bytes = plan.predicted.peak_upper_bytes
    if runs_plain:
        peak_bytes = max(peak_bytes, plan.plain.peak_upper_bytes)
    if told := heap.settle(peak_bytes, room):
        note(told)


def _steps_of(workload: Workload, epochs: int | None) -> int | None:
    """Return the number of optimizer updates in some epochs; None where the batches have no length."""
    if epochs is None or workload.batches is None:
        return epochs
    try:
        return epochs * len(workload.batches)  # type: ignore[arg-type]
    except TypeError:
        return None

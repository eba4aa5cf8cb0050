"""Training with a progress bar, and the demonstration: a byte-level GPT under a budget that its plain step exceeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.rule import Rule

from memfit import hardware, ir, pipeline, recipes
from memfit.cli.output import note, out, stages
from memfit.foundations import format_bytes, format_seconds, parse_budget
from memfit.hardware import free_bytes, is_busy
from memfit.ir import Plan, RunRecord, Views
from memfit.pipeline import trained
from memfit.ranks import launched_size
from memfit.report import comparison_table, estimate_page, frontier_table, plan_table
from memfit.training import PLAN, VIEWS, RunOptions, StepRecord, held_folder
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


def settle_memory(plan: Plan, host_budget: int | float | str | None = None, *, runs_plain: bool = False) -> None:
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
    if told := hardware.heap.settle(peak_bytes, room):
        note(told)


def _steps_of(workload: Workload, epochs: int | None) -> int | None:
    """Return the number of optimizer updates in some epochs; None where the batches have no length."""
    if epochs is None or workload.batches is None:
        return epochs
    try:
        return epochs * len(workload.batches)  # type: ignore[arg-type]
    except TypeError:
        return None


_COMPARED_STEPS = 4  # of which the first is not timed
_PLAIN_BYTES = 600 * 2**20  # no less than the plain step takes
_TRAINING_SECONDS = 15.0
_FEWEST, _MOST = 6, 60


def run_demo(folder: Path, steps: int | None, budget: str, device: str, overwrite: bool) -> None:
    """Estimate, plan, compare, train and report, showing each, in about two minutes.

    Args:
        steps: Optimizer updates; None for as many as take a quarter of a minute.
        device: A device of this machine.

    Raises:
        OutputError: The folder can't be written, is not empty, or another run has it.
        InfeasibleError: No plan fits the budget.
    """
    with held_folder(folder, overwrite=overwrite, resume=False):
        _one_thread_on_a_busy_machine()
        if device == "cpu":
            hardware.heap.keep(_PLAIN_BYTES, free_bytes())  # before operators are timed
        workload = recipes.byte_lm()
        with stages() as progress:
            plain = pipeline.estimate(workload, device=device, progress=progress)
        out.print(Rule("The plain step, predicted without running it"))
        out.print(estimate_page(plain, f"{workload.name} on {device}, 32-true"))
        with stages() as progress:
            plan = pipeline.plan(workload, budget=budget, device=device, progress=progress)
        out.print(Rule(f"The plan for {budget}, and the frontier"))
        out.print(plan_table(plan))
        out.print(frontier_table(plan))
        steps = steps or max(_FEWEST, min(_MOST, int(_TRAINING_SECONDS / plan.predicted.step_seconds)))
        out.print(Rule(f"The plain step and the planned step, compared; then {steps} steps of training with the plan"))
        record = train_with_bar(
            plan,
            workload,
            RunOptions(
                out=folder,
                steps=steps,
                evaluate_every=max(1, steps // 3),
                measure_every=10,
                compare_steps=_COMPARED_STEPS,
                overwrite=overwrite,
            ),
        )
        report = pipeline.write_report(folder)
        comparison = ir.codec.read(folder / VIEWS, Views).comparison
        assert comparison is not None  # asked for above
        out.print(Rule("Predicted and measured"))
        out.print(comparison_table(plan, comparison))
        peak = format_bytes(record.measured_peak_bytes or 0)
        loss = f"{record.first_loss:.3f} → {record.last_loss:.3f}"
        out.print(f"{record.steps} steps: loss {loss}, highest measured peak {peak}", highlight=False)
        out.print(f"The report: {report}", highlight=False, soft_wrap=True)


def _one_thread_on_a_busy_machine() -> None:
    """Compute in one thread on a busy machine, where threads that wait for each other are many times slower."""
    if torch.get_num_threads() > 1 and is_busy():
        torch.set_num_threads(1)
        out.print("Other programs are using this machine: memfit computes with one thread.", highlight=False)

"""The demonstration: a byte-level GPT on the standard library, under a budget that the plain step does not meet."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.rule import Rule

from memfit import pipeline
from memfit.cli.output import out, stages
from memfit.cli.training import train_with_bar
from memfit.hardware import heap
from memfit.hardware.host import free_bytes, is_busy
from memfit.ir import codec
from memfit.ir.run_record import Views
from memfit.recipes import byte_lm
from memfit.report.estimates import estimate_page
from memfit.report.tables import comparison_table, frontier_table, plan_table
from memfit.training.runs.folder import VIEWS, held_folder
from memfit.training.runs.log import RunOptions
from memfit.units import format_bytes

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
            heap.keep(_PLAIN_BYTES, free_bytes())  # before operators are timed
        workload = byte_lm()
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
        comparison = codec.read(folder / VIEWS, Views).comparison
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

"""Training with a bar."""

from __future__ import annotations

from typing import Any

from memfit import pipeline
from memfit.cli.output import stages
from memfit.ir.plan import Plan
from memfit.ir.record import RunRecord
from memfit.train.log import Progress
from memfit.units import format_bytes, format_seconds
from memfit.workload import Workload


def train_with_bar(plan: Plan, workload: Workload, *, steps: int | None, **arguments: Any) -> RunRecord:
    """Train as `memfit.train` does, and show how far it is: loss, step time, and the last measured peak."""
    peak = ""
    total = steps if steps is not None else _steps_of(workload, arguments.get("epochs"))
    is_prepared = False
    with stages() as report:

        def compared(done: int, of: int) -> None:
            report("plain and planned", done, of)
            if done == of:
                report("prepare", 0, 1)

        def on_step(progress: Progress) -> None:
            nonlocal peak, is_prepared
            if not is_prepared:
                is_prepared = True
                report("prepare", 1, 1)
                report("train", progress.step - 1, total)
            if progress.peak_bytes is not None:
                peak = f", peak {format_bytes(progress.peak_bytes)}"
            note = f"loss {progress.loss:.4f}, {format_seconds(progress.seconds)} a step{peak}"
            report("train", progress.step, total, note)

        if not arguments.get("compare_steps"):
            report("prepare", 0, 1)
        return pipeline.train(plan, workload, steps=steps, progress=compared, on_step=on_step, **arguments)


def _steps_of(workload: Workload, epochs: int | None) -> int | None:
    """Return the optimizer updates of some passes over the data; None where its batches have no number."""
    if epochs is None or workload.batches is None:
        return epochs
    try:
        return epochs * len(workload.batches)  # type: ignore[arg-type]
    except TypeError:
        return None

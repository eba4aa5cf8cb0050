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
    with stages() as report:

        def compared(done: int, total: int) -> None:
            report("plain and planned", done, total)

        def on_step(progress: Progress) -> None:
            nonlocal peak
            if progress.peak_bytes is not None:
                peak = f", peak {format_bytes(progress.peak_bytes)}"
            note = f"loss {progress.loss:.4f}, {format_seconds(progress.seconds)} a step{peak}"
            report("train", progress.step, steps, note)

        return pipeline.train(plan, workload, steps=steps, progress=compared, on_step=on_step, **arguments)

"""The options of a run: one record, from `memfit.train` or the command line to all that takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError
from memfit.training.runs.log import LogFunction, StepRecord


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `memfit.train`, as it takes them; its docstring has those that are not named here.

    Attributes:
        out: Folder of the run: `run.json`, `plan.json`, `metrics.jsonl`, `checkpoint-<step>/`, `tensorboard/`.
        steps: Total number of optimizer updates, those before resuming included (> 0). Either this or `epochs`.
        epochs: Total number of passes over the workload's batches (> 0).
        evaluate_every: Steps between evaluations (> 0); None evaluates at the end only.
        checkpoint_every: Steps between checkpoints (> 0), the first before the first step, so that a folder that can't
            be written is noticed then; None writes one at the end only.
        keep_checkpoints: Number of checkpoints to keep (> 0).
        async_checkpoints: Whether a thread writes those of `checkpoint_every` from copies in host memory, while steps
            run. The next one, and the end of the run, wait for it. The first and the last are written at once.
        prefetch_batches: Number of batches to load ahead; see `BatchStream`.
        measure_every: Steps between measurements (> 0), from the second step on, or the third where ranks keep buckets;
            None measures that one alone.
        tensorboard: Whether to write TensorBoard scalars too.
        resume: Whether to resume from the newest undamaged checkpoint in `out`, under `plan`, whichever plan and
            precision the checkpoint has. Damaged ones are set aside and reported.
        overwrite: Whether to replace the run in `out`.
        on_step: Called after every step, skipped ones included.
        log: Given each line of `metrics.jsonl` as a dict of its own, for an experiment tracker; on ranks, on the first
            alone. What it raises ends the run as it is, with a checkpoint from which to resume.
    """

    out: Path
    steps: int | None = None
    epochs: int | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    async_checkpoints: bool = False
    prefetch_batches: int = 0
    measure_every: int | None = None
    compare_steps: int = 0
    tensorboard: bool = False
    resume: bool = False
    overwrite: bool = False
    recover: bool | None = None
    limit_bytes: int | None = None
    adaptive: bool = False
    host_budget: int | float | str | None = None
    progress: Callable[[int, int], None] | None = None
    on_step: Callable[[StepRecord], None] | None = None
    log: LogFunction | None = None

    def check(self) -> None:
        """Raise UsageError where an option is out of its range."""
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(f"steps={self.steps} and epochs={self.epochs}: give one of them")
        for name in ("steps", "epochs", "evaluate_every", "checkpoint_every", "keep_checkpoints", "measure_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r} is not a whole number above 0")
        if self.async_checkpoints and self.checkpoint_every is None:
            raise UsageError(
                "async_checkpoints=True needs checkpoint_every=: only checkpoints during the run are written in the"
                " background"
            )

"""The options of a run: one record, from `memfit.train` or the command line to all that takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memfit.errors import UsageError
from memfit.foundations import CommandOption

if TYPE_CHECKING:
    from memfit.training.runs.log import LogFunction, StepRecord
else:  # the command line reads this module without PyTorch
    LogFunction = StepRecord = object

LOG_HELP = "Function to call with each step's record, a dict: file.py:function or package.module:function."
OVERWRITE_HELP = "Replace existing files."


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
        async_checkpoints: Whether a thread writes those of `checkpoint_every` from copies in host memory, while steps
            run. The next one, and the end of the run, wait for it. The first and the last are written at once.
        prefetch_batches: Number of batches to load ahead; see `BatchStream`.
        measure_every: Steps between measurements (> 0), from the second step on, or the third where ranks keep buckets;
            None measures that one alone.
        log: Given each line of `metrics.jsonl` as a dict of its own, for an experiment tracker; on ranks, on the first
            alone. What it raises ends the run as it is, with a checkpoint from which to resume.
        resume: Whether to resume from the newest undamaged checkpoint in `out`, under `plan`, whichever plan and
            precision the checkpoint has. Damaged ones are set aside and reported.
        on_step: Called after every step, skipped ones included.
    """

    out: Annotated[Path, CommandOption("The run's folder.", name="output", flags=("--out",), show_default=False)]
    steps: Annotated[int | None, CommandOption("Optimizer updates; or give --epochs.", min=1)] = None
    epochs: Annotated[int | None, CommandOption("Passes over the workload's batches; or give --steps.", min=1)] = None
    evaluate_every: Annotated[int | None, CommandOption("Steps between evaluations.", min=1)] = None
    checkpoint_every: Annotated[int | None, CommandOption("Steps between checkpoints.", min=1)] = None
    keep_checkpoints: Annotated[int, CommandOption("Number of checkpoints to keep.", min=1)] = 2
    async_checkpoints: Annotated[
        bool,
        CommandOption(
            "Write checkpoints in a thread, from copies in host memory, while steps run.",
            flags=("--async-checkpoints",),
        ),
    ] = False
    prefetch_batches: Annotated[
        int, CommandOption("Number of batches to make ahead, in a thread, while steps run.", min=0)
    ] = 0
    measure_every: Annotated[
        int | None,
        CommandOption("Steps between measurements of the peak. Step 2 (with DDP step 3) is always measured.", min=1),
    ] = None
    compare_steps: Annotated[
        int,
        CommandOption(
            "Before training, steps to run side by side with the plain step; 0 for none.", name="compare", min=0
        ),
    ] = 0
    recover: Annotated[
        bool | None,
        CommandOption(
            "After out of memory, run the step again under the next lower plan; by default where possible.",
            flags=("--recover/--no-recover",),
        ),
    ] = None
    limit_bytes: Annotated[
        int | None,
        CommandOption(
            "Limit of a step's memory: bytes, or with a unit (1.5GiB). A step fails before it exceeds the limit.",
            name="limit",
            kind=str,
        ),
    ] = None
    adaptive: Annotated[
        bool, CommandOption("Run batches of other shapes with plans of their own.", flags=("--adaptive",))
    ] = False
    host_budget: Annotated[
        int | float | str | None,
        CommandOption("Host memory for the run (64GiB, 90%); by default the host's free memory.", kind=str),
    ] = None
    log: Annotated[LogFunction | None, CommandOption(LOG_HELP, kind=str)] = None
    tensorboard: Annotated[bool, CommandOption("Write TensorBoard scalars too.")] = False
    resume: Annotated[bool, CommandOption("Continue from the run's latest checkpoint.")] = False
    overwrite: Annotated[bool, CommandOption(OVERWRITE_HELP)] = False
    progress: Callable[[int, int], None] | None = None
    on_step: Callable[[StepRecord], None] | None = None

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

"""memfit inside Lightning's `Trainer`."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from memfit.errors import MissingExtraError, UsageError
from memfit.integrations.fitted import MIXED, Fitted, optimizer_like
from memfit.ir.plan import Plan
from memfit.workload import Workload, batch_size_of

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as e:
    raise MissingExtraError("memfit.integrations.lightning", "lightning", e.name or "lightning") from e


class MemfitCallback(Callback):  # type: ignore[misc]
    """Plans for a `LightningModule`, and checkpoints it while it is fitted.

    The trainer is made with `trainer_arguments`, and the loader with `microbatch_size`:

        memory = MemfitCallback(module, batch, budget="8GiB")
        trainer = Trainer(**memory.trainer_arguments, callbacks=[memory])
        trainer.fit(module, DataLoader(data, batch_size=memory.microbatch_size))

    Lightning divides every microbatch's loss by `accumulate_grad_batches`: have `training_step` return a mean, and
    the data divide into whole global batches (`drop_last=True`), for the same numbers as the global batch.

    Args:
        module: A `LightningModule` with automatic optimization, not attached to a trainer.
        batch: One global batch, as `training_step` takes it.
        budget: Of memory, as `memfit.plan` takes it.
        options: Further options of `memfit.plan`.

    Attributes:
        plan: The plan.
        microbatch_size: For the loader.
        trainer_arguments: For `lightning.pytorch.Trainer`.
    """

    def __init__(self, module: Any, batch: Any, *, budget: int | float | str, **options: Any) -> None:
        workload = Workload(module, batch, _training_step, optimizer_like(module), name=type(module).__name__)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*self\.log.*", category=UserWarning)
            self._fitted = Fitted(workload, budget=budget, **({"precisions": list(MIXED[:2])} | options))
        self.plan: Plan = self._fitted.plan
        self.microbatch_size = self._fitted.microbatch_size
        self.trainer_arguments = {
            "precision": self._fitted.precision,
            "accumulate_grad_batches": self._fitted.accumulation,
        }

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoint the module, if the trainer is what the plan asks for."""
        for name, value in self.trainer_arguments.items():
            if getattr(trainer, name) != value:
                raise UsageError(
                    f"Trainer({name}={getattr(trainer, name)!r}), and the plan needs {value!r}: make it with"
                    " Trainer(**callback.trainer_arguments, callbacks=[callback])"
                )
        self._fitted.checkpoint(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check that a batch is no larger than the plan allows."""
        if batch_size_of(batch) > self.microbatch_size:
            raise UsageError(
                f"the loader gives {batch_size_of(batch)} samples at once, and the plan allows {self.microbatch_size}:"
                " make it with batch_size=callback.microbatch_size"
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo what was done to the module."""
        self._fitted.close()


def _training_step(module: nn.Module, batch: Any) -> Any:
    """Return the loss of a module's training step."""
    out: Any = module.training_step(batch, 0)  # type: ignore[operator]
    return out["loss"] if isinstance(out, dict) else out

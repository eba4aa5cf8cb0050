"""memfit inside Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import MissingExtraError, UsageError
from memfit.integrations.fitted import MIXED, NAMES, Fitted
from memfit.ir.plan import Plan, Precision
from memfit.rng import rng_preserved
from memfit.workload import Workload, batch_size_of

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback
except ImportError as e:
    raise MissingExtraError("memfit.integrations.transformers", "transformers", e.name or "transformers") from e


class MemfitCallback(TrainerCallback):  # type: ignore[misc]
    """Plans for a `Trainer`, sets its arguments, and checkpoints its model while it trains.

    The global batch, `per_device_train_batch_size * gradient_accumulation_steps` when this is made, stays: memfit
    chooses how it is cut. `bf16=True` or `fp16=True` of the arguments stay too; with neither, `numerics="reduced"`
    lets memfit choose. Turn `activation_checkpointing` (once `gradient_checkpointing`) off.

    Args:
        trainer: A `transformers.Trainer`, before `train()`. Add the callback to it: `trainer.add_callback(callback)`.
        budget: Of memory, as `memfit.plan` takes it.
        options: Further options of `memfit.plan`.

    Attributes:
        plan: The plan.

    Raises:
        UsageError: The trainer checkpoints by itself, or runs on several processes.
        InfeasibleError: No plan fits the budget.
    """

    def __init__(self, trainer: Any, *, budget: int | float | str, **options: Any) -> None:
        args = trainer.args
        if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
            raise UsageError(
                "TrainingArguments.activation_checkpointing=True: leave it out, memfit chooses what to recompute"
            )
        if args.world_size > 1:
            raise UsageError(f"the trainer runs on {args.world_size} processes: memfit plans for one")
        asked = _asked_precision(args)
        if asked != "32-true":
            options = {"precisions": [asked], "numerics": "reduced"} | options
        else:
            options = {"precisions": [p for p in MIXED if p != "16-mixed"]} | options
        self._fitted = Fitted(_workload(trainer), budget=budget, **options)
        self.plan: Plan = self._fitted.plan
        _set(trainer, self._fitted, asked)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Checkpoint the model."""
        self._fitted.checkpoint(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo it."""
        self._fitted.close()


def _asked_precision(args: Any) -> Precision:
    return "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else "32-true"


def _workload(trainer: Any) -> Workload:
    """Return the trainer's step at its global batch."""
    args = trainer.args
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    before, trainer._train_batch_size = trainer._train_batch_size, samples
    try:
        with rng_preserved():
            batch = dict(next(iter(trainer.get_train_dataloader())))
    finally:
        trainer._train_batch_size = before
    if batch_size_of(batch) != samples:
        raise UsageError(
            f"the training data gives {batch_size_of(batch)} samples where per_device_train_batch_size *"
            f" gradient_accumulation_steps is {samples}: lower one of them"
        )
    trainer.create_optimizer()

    def loss_fn(model: Any, inputs: Mapping[str, Any]) -> Any:
        return trainer.compute_loss(model, dict(inputs))

    return Workload(
        trainer.model, batch, loss_fn, trainer.optimizer, name="trainer", max_grad_norm=args.max_grad_norm or None
    )


def _set(trainer: Any, fitted: Fitted, asked: Precision) -> None:
    args = trainer.args
    args.per_device_train_batch_size = trainer._train_batch_size = fitted.microbatch_size
    args.gradient_accumulation_steps = fitted.accumulation
    if fitted.precision == asked:
        return
    args.bf16, args.mixed_precision = fitted.precision == "bf16-mixed", NAMES[fitted.precision]
    AcceleratorState._reset_state()  # the trainer has made its accelerator for another precision
    trainer.create_accelerator_and_postprocess()

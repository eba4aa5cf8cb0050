"""memfit inside Lightning's `Trainer`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memfit._torch import tree_leaves
from memfit.errors import UsageError, brought_by
from memfit.foundations import Words
from memfit.integrations.trainer_plan import TrainerPlan, check_budget, data_parallel
from memfit.ir import Plan
from memfit.ir import Sharding as Sharding
from memfit.ranks import SingleProcess, check_shared, joined, launched_size
from memfit.training import LogFunction, parameters_of
from memfit.workload import Workload, batch_size_of, rng_preserved

with brought_by("lightning", "memfit.integrations.lightning"):
    from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

_ALTERNATIVES = (
    "train in a loop of your own with memfit.apply(plan, workload), a Workload for each optimizer, or run your script"
    " as it is: memfit run --budget ... train.py"
)

_WORDS = Words(
    {"microbatch_size": "batch_size="},
    {
        "model": "the module",
        "batch": "the batch (batch_size of its DataLoader)",
        "loss_fn": "training_step",
        "optimizer": "the optimizer of configure_optimizers",
        "max_grad_norm": "Trainer(gradient_clip_val=...)",
    },
)


class MemfitCallback(TrainerPlan, Callback):  # type: ignore[misc]
    """A callback that plans for a `LightningModule`, and checkpoints it while it is fitted.

    The trainer is made with `trainer_arguments`, and the loader with `microbatch_size`:

        memory = MemfitCallback(module, batch, budget="8GiB")
        trainer = Trainer(**memory.trainer_arguments, callbacks=[memory])
        trainer.fit(module, DataLoader(data, batch_size=memory.microbatch_size))

    The plan is made for the optimizer that `configure_optimizers` returns, alone or with schedulers. Gradients are
    zeroed by the module's `optimizer_zero_grad` before the forward pass and before validation; Lightning itself zeroes
    them after the forward pass, so that they take memory during it.

    Lightning divides every microbatch's loss by `accumulate_grad_batches`: have `training_step` return a mean, and
    the data divide into whole global batches (`drop_last=True`), for the same numbers as the global batch.

    Args:
        module: A `LightningModule` with automatic optimization, not attached to a trainer.
        batch: One global batch, as passed to `training_step`; with several ranks, that of one of them.
        budget: The memory budget, as for `memfit.plan`; of one rank where there are several.
        plan: A plan that was made for such a module and batch, or its file, instead of a budget.
        engine: How the strategy has ranks share the step: for `ModelParallelStrategy`, `Sharding(mode="zero3",
            units=...)` with the modules on which `configure_model` calls `fully_shard`. None for
            `DistributedDataParallel` among the processes that a launcher has started.
        optimizer: An optimizer over the module's parameters to plan with, where `configure_optimizers` needs a trainer;
            None for the result of `configure_optimizers`.
        validation_batch: The largest batch of `validation_step`, where that has more samples than `microbatch_size`;
            None where no validation loader gives more.
        log: Given a dict for each update: `step`, `seconds`, `peak_bytes` and `predicted_peak_bytes`, as by
            `memfit.fit`, on the first rank. The loss goes where the module's `self.log` says.
        options: Further options of `memfit.plan`.

    Attributes:
        plan: The plan.
        microbatch_size: Batch size for the loader.
        trainer_arguments: Arguments for `lightning.pytorch.Trainer`.

    Raises:
        UsageError: The module has several optimizers, or uses manual optimization; or validation needs more than the
            budget; or the strategy is one that memfit can't count, when the training begins.
        InfeasibleError: No plan fits the budget.
    """

    advice, words = "give the largest batch as MemfitCallback(batch=...)", _WORDS

    def __init__(
        self,
        module: Any,
        batch: Any,
        *,
        budget: int | float | str | None = None,
        plan: Plan | Path | str | None = None,
        engine: Sharding | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        validation_batch: Any = None,
        log: LogFunction | None = None,
        **options: Any,
    ) -> None:
        check_budget(budget, plan)
        if engine is None and launched_size() > 1:
            engine = data_parallel(launched_size(), {})
        if engine is not None:
            check_shared(engine.world_size, "engine=", f"give it world_size={launched_size()}")
        # Gradients of each microbatch are sent by its ModelParallelStrategy, and of the last by its DDPStrategy.
        engine = engine and replace(engine, reduces="each" if engine.is_fully_sharded else "last")
        planned = _configured(module) if optimizer is None else optimizer
        workload = Workload(module, batch, _training_step, planned, name=type(module).__name__)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*self\.log.*", category=UserWarning)
            with joined("cpu") if launched_size() > 1 else contextlib.nullcontext(SingleProcess()) as ranks:
                super().__init__(
                    workload,
                    engine=engine,
                    ranks=ranks,
                    given=plan,
                    budget=budget,
                    log=log,
                    **options,
                )
                self._validated = self.microbatch_size
                if validation_batch is not None and batch_size_of(validation_batch) > self._validated:
                    self._validated = batch_size_of(validation_batch)
                    argument = f"validation_batch= of {self._validated} samples"
                    self.check_evaluation(workload, validation_batch, _validation_step, argument)
        self._optimizer_kind = None if planned is None else _kind(planned)
        self._is_spent = False
        self.trainer_arguments = {"precision": self.precision, "accumulate_grad_batches": self.accumulation}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the trainer has the plan's settings, and checkpoint the module."""
        for name, value in self.trainer_arguments.items():
            if getattr(trainer, name) != value:
                raise UsageError(
                    f"Trainer({name}={getattr(trainer, name)!r}), and the plan needs {name}={value!r}: create it with"
                    " Trainer(**callback.trainer_arguments, callbacks=[callback])"
                )
        self._check_engine(trainer, pl_module)
        if any(isinstance(other, GradientAccumulationScheduler) for other in trainer.callbacks):
            raise UsageError(
                "Trainer(callbacks=[GradientAccumulationScheduler(...)]) changes accumulate_grad_batches while it"
                f" trains, and the plan needs {self.accumulation}: leave it out"
            )
        kinds = [_kind(optimizer) for optimizer in trainer.optimizers]
        if self._optimizer_kind is not None and kinds != [self._optimizer_kind]:
            raise UsageError(
                f"the trainer has the optimizer {', '.join(kinds)}, and the plan was made for"
                f" {self._optimizer_kind}: create the callback anew from this module, or give it the optimizer of"
                " configure_optimizers as optimizer="
            )
        self._is_spent = False
        self.checkpoint(pl_module)

    def _check_engine(self, trainer: Any, pl_module: nn.Module) -> None:
        planned, name = self._engine, type(trainer.strategy).__name__
        size = 1 if planned is None else planned.world_size
        if trainer.world_size != size:
            raise UsageError(
                f"Trainer(devices={trainer.num_devices}, num_nodes={trainer.num_nodes}) trains on"
                f" {trainer.world_size} processes, and the plan is for {size}: start them by torchrun"
                f" --nproc-per-node {trainer.num_devices}, so that the callback sees them, or give devices=1,"
                " num_nodes=1"
            )
        wrapped = trainer.strategy.model
        units = {fqn for fqn, module in pl_module.named_modules() if fqn and isinstance(module, FSDPModule)}
        if units or isinstance(pl_module, FSDPModule):
            wanted = set(planned.units or ()) if planned is not None and planned.is_fully_sharded else set()
            if planned is None or not planned.is_fully_sharded or units != wanted:
                raise UsageError(
                    f"configure_model of {type(pl_module).__name__} calls fully_shard on {sorted(units)}, and the plan"
                    f" assumes {sorted(wanted)}: give MemfitCallback(engine=Sharding(world_size={size},"
                    f' mode="zero3", units={tuple(sorted(units))}))'
                )
        elif isinstance(wrapped, DistributedDataParallel):
            first = wrapped.bucket_bytes_cap if not wrapped.bucket_bytes_cap_default else 2**20
            found = Sharding(
                world_size=size,
                mode="ddp",
                reduces="last",
                gradient_as_bucket_view=wrapped.gradient_as_bucket_view,
                bucket_cap_bytes=wrapped.bucket_bytes_cap,
                first_bucket_bytes=first,
            )
            if found != planned:
                raise UsageError(
                    f"{name} makes {found}, and the plan is for {planned}: give MemfitCallback(engine={found})"
                )
        elif size > 1:
            raise UsageError(
                f"Trainer(strategy=...) is {name}, which memfit does not predict: give strategy='ddp', or"
                " ModelParallelStrategy with fully_shard in configure_model (FSDPStrategy is FSDP1)"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the batch sizes of the validation loaders that state one."""
        for loader in tree_leaves(trainer.val_dataloaders):
            self._check_validated(getattr(loader, "batch_size", None) or 0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check that a batch is no larger than the plan allows, and drop the gradients of the last update."""
        if batch_size_of(batch) > self.microbatch_size:
            raise UsageError(
                f"the loader gives batches of {batch_size_of(batch)} samples, and the plan allows"
                f" {self.microbatch_size}: create it with batch_size=callback.microbatch_size"
            )
        self.look(batch)
        self._zero_grad(trainer, pl_module, batch_idx)
        self._log.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the step, where the batch ended one."""
        if self._is_spent:
            self._log.update()
            self._log.end(self.plan.predicted.peak_bytes, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note that the gradients are used."""
        self._is_spent = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop the gradients of the last update."""
        self._zero_grad(trainer, pl_module, 0)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check that a batch has no more samples than the plan counted with."""
        self._check_validated(batch_size_of(batch))

    def _check_validated(self, size: int) -> None:
        if size > self._validated:
            raise UsageError(
                f"a validation loader gives batches of {size} samples, and the plan assumes"
                f" {self._validated}: create it with batch_size={self._validated}, or give one of its batches"
                " as MemfitCallback(validation_batch=...)"
            )

    def _zero_grad(self, trainer: Any, pl_module: Any, batch_idx: int) -> None:
        """Zero the gradients of the last update, which Lightning would do after the next forward pass."""
        if not self._is_spent:
            return
        self._is_spent = False
        for optimizer in trainer.optimizers:
            pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        if any(p.grad is not None for optimizer in trainer.optimizers for p in parameters_of(optimizer)):
            raise UsageError(
                f"{type(pl_module).__name__}.optimizer_zero_grad leaves gradients in memory, and the plan"
                " assumes none in the forward pass: call optimizer.zero_grad(set_to_none=True) in it"
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the checkpointing of the module: Lightning calls no `teardown` then."""
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the checkpointing of the module."""
        self.close()


def _training_step(module: nn.Module, batch: Any) -> Any:
    out: Any = module.training_step(batch, 0)  # type: ignore[operator]
    return out["loss"] if isinstance(out, dict) else out


def _validation_step(module: nn.Module, batch: Any) -> None:
    module.validation_step(batch, 0)  # type: ignore[operator]


def _configured(module: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that a module trains with; None where it has none."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name}.automatic_optimization=False: its training_step updates in an order that memfit can't plan for."
            f" Leave it True, or {_ALTERNATIVES}"
        )
    try:
        with rng_preserved():
            returned = module.configure_optimizers()
    except Exception as e:
        raise UsageError(
            f"{name}.configure_optimizers() failed without a trainer ({type(e).__name__}: {e}): give"
            " MemfitCallback(optimizer=...), the same optimizer over the module's parameters without its"
            " scheduler"
        ) from e
    optimizers = _optimizers_in(returned)
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise UsageError(
            f"{name}.configure_optimizers() returns {len(optimizers)} optimizers ({kinds}), and the plan is for one:"
            f" return one with several parameter groups, or {_ALTERNATIVES}"
        )
    return optimizers[0] if optimizers else None


def _optimizers_in(returned: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a result of `configure_optimizers`, in any form that Lightning documents."""
    if returned is None:
        return []
    if isinstance(returned, Mapping):
        return [returned["optimizer"]]
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):  # optimizers, and schedulers
            returned = returned[0]
        return [optimizer for part in returned for optimizer in _optimizers_in(part)]
    return [returned]


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class, groups and options of an optimizer, which determine its memory."""
    groups = []
    for group in optimizer.param_groups:
        on = [name for name in sorted(optimizer.defaults) if name != "lr" and _is_on(group.get(name))]
        groups.append(f"({len(group['params'])} parameters with {', '.join(on) or 'no options'})")
    return " ".join((type(optimizer).__name__, *groups))


def _is_on(value: Any) -> bool:
    return any(map(_is_on, value)) if isinstance(value, (list, tuple)) else bool(value)

"""memfit inside Hugging Face's `Trainer`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from memfit.errors import UsageError, brought_by
from memfit.foundations import Words
from memfit.integrations.trainer_plan import NAMES, TrainerPlan, check_budget
from memfit.ir import Plan
from memfit.pipeline import device_kind
from memfit.ranks import Group, SingleProcess, agreed
from memfit.training import LogFunction, modes_restored
from memfit.workload import Workload, batch_size_of, map_tensors, rng_preserved, tensors_of

with brought_by("transformers", "memfit.integrations.transformers"):
    from accelerate.utils import convert_outputs_to_fp32
    from transformers import Trainer, TrainerCallback

    from memfit.integrations import internals
    from memfit.integrations.accelerate import OWN_CHECKPOINTING, engine_of, own_checkpointing

_WORDS = Words(
    dict.fromkeys(("microbatch_size", "batch_size"), "per_device_train_batch_size="),
    {
        "model": "the trainer's model",
        "batch": "the batch (per_device_train_batch_size)",
        "loss_fn": "compute_loss",
        "optimizer": "the trainer's optimizer",
        "max_grad_norm": "TrainingArguments.max_grad_norm",
    },
)
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # the former until transformers 6


class MemfitCallback(TrainerPlan, TrainerCallback):  # type: ignore[misc]
    """A callback that plans for a `Trainer`, sets its arguments, and checkpoints its model while it trains.

    The global batch stays `per_device_train_batch_size * gradient_accumulation_steps` of the arguments: memfit chooses
    the microbatch size. `bf16=True` or `fp16=True` stay too; with neither, `numerics="reduced"` lets memfit choose the
    precision. `gradient_checkpointing=True`, or enabled on the model, is turned off: the plan's recomputation replaces
    it.

    Args:
        trainer: A `transformers.Trainer` or subclass, as TRL's `SFTTrainer`, before `train()`. Add
            the callback to it: `trainer.add_callback(callback)`.
        budget: The memory budget, as for `memfit.plan`; of one rank where there are several.
        plan: A plan that was made under such a trainer, or its file, instead of a budget.
        batch: One global batch of the trainer's collator to plan with: the largest, where they differ; None
            for the first of the training data.
        log: Given a dict for each update: `step`, `seconds`, `peak_bytes` and `predicted_peak_bytes`, as by
            `memfit.fit`, on the first rank. The loss goes where `TrainingArguments.report_to` says.
        options: Further options of `memfit.plan`.

    Attributes:
        plan: The plan.

    Raises:
        UsageError: The trainer shares its step by an engine that memfit can't count, spreads batches over several GPUs
            in one process, compiles the model, or evaluates batches that don't fit; or `numerics="exact"` is given and
            the trainer accumulates gradients.
        InfeasibleError: No plan fits the budget.
    """

    advice = "give the largest batch of the collator as MemfitCallback(batch=...), or cut sequences to its length"
    words = _WORDS

    def __init__(
        self,
        trainer: Any,
        *,
        budget: int | float | str | None = None,
        plan: Plan | Path | str | None = None,
        batch: Any = None,
        log: LogFunction | None = None,
        **options: Any,
    ) -> None:
        args = trainer.args
        check_budget(budget, plan)
        _check(args, options.get("numerics"))
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        shared = {} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb}
        engine = engine_of(trainer.accelerator, trainer.model, shared)
        ranks = SingleProcess() if engine is None else Group(args.device.type)
        back, notes = _checkpointing_off(trainer)
        try:
            # On every rank: loaders of several ranks send what they draw.
            workload = agreed(ranks, lambda: _workload(trainer, batch, dtype, options.get("device")))
            with modes_restored(trainer.model):
                trainer.model.train()  # as the trainer's step does; from_pretrained() leaves it in evaluation mode
                super().__init__(
                    workload,
                    engine=engine,
                    ranks=ranks,
                    given=plan,
                    keeps_precision=dtype is not None,
                    budget=budget,
                    log=log,
                    **options,
                )
                notes += _check_evaluations(trainer, self, workload, dtype)
        except BaseException:
            back()
            raise
        self.plan = replace(self.plan, notes=[*self.plan.notes, *notes])
        args.per_device_train_batch_size = self.microbatch_size
        internals.set_train_batch_size(trainer, self.microbatch_size)
        args.gradient_accumulation_steps = self.accumulation
        if self.precision != "32-true":  # else the arguments' own
            args.bf16, args.mixed_precision = self.precision == "bf16-mixed", NAMES[self.precision]
            internals.forget_accelerator_state()  # the trainer's accelerator was made for another precision
            trainer.create_accelerator_and_postprocess()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Checkpoint the model."""
        self.checkpoint(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note that a step begins."""
        self._log.begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the step."""
        self._log.update()
        self._log.end(self.plan.predicted.peak_bytes, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo the checkpointing."""
        self.close()


def _check(args: Any, numerics: str | None) -> None:
    """Refuse trainer arguments that memfit can't plan for, each by its name."""
    if args.n_gpu > 1:
        raise UsageError(
            f"TrainingArguments.n_gpu={args.n_gpu}: the trainer spreads each batch over {args.n_gpu} GPUs, and memfit"
            " plans for one. Set CUDA_VISIBLE_DEVICES=0"
        )
    if args.torch_compile:
        raise UsageError(
            "TrainingArguments.torch_compile=True: the trainer compiles the model, and the plan is for the uncompiled"
            " step. Leave torch_compile, torch_compile_backend and torch_compile_mode out"
        )
    if args.gradient_accumulation_steps > 1 and numerics == "exact":
        size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        raise UsageError(
            f"TrainingArguments.gradient_accumulation_steps={steps} and numerics='exact': an exact plan runs the global"
            f" batch of {size * steps} samples at once, which adds gradients up in another order than {steps}"
            f" microbatches of {size}. Give per_device_train_batch_size={size * steps} and"
            " gradient_accumulation_steps=1, or allow numerics='reordered'"
        )


def _checkpointing_off(trainer: Any) -> tuple[Callable[[], None], list[str]]:
    """Turn the trainer's own checkpointing off; return a function that turns it on again, and notes."""
    args, off = trainer.args, []
    on = [(args, name) for name in _CHECKPOINTING if getattr(args, name, False)]
    if on:
        off.append("TrainingArguments.gradient_checkpointing=True")
    if (plugin := own_checkpointing(trainer.accelerator)) is not None:
        on.append((plugin, _CHECKPOINTING[1]))
        off.append(OWN_CHECKPOINTING)
    name = "gradient_checkpointing"
    modules = [(module, name) for module in trainer.model.modules() if getattr(module, name, False) is True]
    if modules:
        off.append("the model's own gradient checkpointing (gradient_checkpointing_enable())")
    for owner, name in (*on, *modules):
        setattr(owner, name, False)

    def turn_on() -> None:
        for owner, name in (*on, *modules):
            setattr(owner, name, True)

    return turn_on, [f"{setting} is turned off: the plan's recomputation replaces it" for setting in off]


def _workload(trainer: Any, batch: Any, dtype: torch.dtype | None, device: str | None) -> Workload:
    """Return a workload for the trainer's step at its global batch."""
    args = trainer.args
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    where, rows = "batch=", 1
    if batch is None:
        where, batch = "the training data", _first_batch(trainer, samples)
        rows = max(1, batch_size_of(batch) // samples)
    elif batch_size_of(batch) != samples:
        rows = batch_size_of(_first_batch(trainer, 1))
    if batch_size_of(batch) != samples * rows:
        raise UsageError(
            f"{where} gives {batch_size_of(batch) // rows} samples where per_device_train_batch_size *"
            f" gradient_accumulation_steps is {samples}: lower one of them"
        )
    trainer.create_optimizer()
    # On the CPU the loader holds the next batch while one is used; to a GPU it is sent after that.
    ahead = batch if (device or device_kind(trainer.model)) == "cpu" else None
    loss_fn = _Loss(trainer, dtype, ahead)
    name = f"trainer, in {str(dtype)[6:]}" if dtype else "trainer"
    workload = Workload(
        trainer.model, batch, loss_fn, trainer.optimizer, name=name, max_grad_norm=args.max_grad_norm or None
    )
    if rows == 1:
        return workload
    return dataclasses.replace(
        workload, batch_size=functools.partial(_samples, rows), split=functools.partial(_cut, rows)
    )


def _samples(rows: int, batch: Any) -> int:
    """Return the samples of a batch whose collator makes several rows of each, as of a chosen and a rejected answer."""
    return batch_size_of(batch) // rows


def _cut(rows: int, batch: Any, start: int, stop: int) -> Any:
    """Return some samples of such a batch: the first rows of all samples come first, then the second ones."""
    count = _samples(rows, batch)
    return map_tensors(
        lambda t: t.unflatten(0, (rows, count))[:, start:stop].flatten(0, 1) if t.dim() else t, dict(batch)
    )


def _first_batch(trainer: Any, samples: int) -> dict[str, Any]:
    before = internals.train_batch_size(trainer)
    internals.set_train_batch_size(trainer, samples)
    try:
        with rng_preserved():
            found = next(iter(trainer.get_train_dataloader()))
    finally:
        internals.set_train_batch_size(trainer, before)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{type(trainer).__name__} makes tensors from batches of type {type(found).__name__} only during"
            " training, so memfit can't plan before: run the script as it is, by memfit run --budget ..."
            " train.py"
        )
    return dict(found)


class _Loss:
    """A trainer's loss, for a model as accelerate would prepare it.

    Args:
        trainer: The trainer. Its notes on a loss (TRL counts tokens and collects metrics) go into a copy.
        dtype: Dtype that accelerate casts to, by the trainer's arguments; None for no casts.
        ahead: Tensors that the loader holds besides the batch; None for nothing.
    """

    def __init__(self, trainer: Any, dtype: torch.dtype | None, ahead: Any = None) -> None:
        self.trainer = copied = copy.copy(trainer)  # with copies of its plain containers, and without its data sets
        copied.__dict__.update({name: _own(value) for name, value in vars(trainer).items()})
        copied.train_dataset = copied.eval_dataset = None  # no loss reads them, and they would be copied and counted
        self.dtype = dtype
        self.ahead = nn.Module()
        for index, tensor in enumerate(tensors_of(ahead)):
            self.ahead.register_buffer(f"tensor_{index}", tensor.clone())

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        with _prepared(model, self.dtype):
            return self.trainer.compute_loss(model, dict(inputs))


def _own(value: Any) -> Any:
    if isinstance(value, (dict, list)) and type(value).__module__ in ("builtins", "collections"):
        copied = copy.copy(value)
        for key, inner in copied.items() if isinstance(copied, dict) else enumerate(copied):
            copied[key] = _own(inner)
        return copied
    return value


@contextlib.contextmanager
def _prepared(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast in a model's `forward` as accelerate does: autocast within, outputs in fp32."""
    kind = device_kind(model)
    if dtype is None and not torch.is_autocast_enabled(kind):
        yield
        return
    inner, before = model.forward, vars(model).get("forward")
    cast = inner if dtype is None else torch.autocast(kind, dtype)(inner)
    model.forward = convert_outputs_to_fp32(cast)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


class _Evaluation(_Loss):
    """A trainer's evaluation of a batch, with the outputs of those before it, which it keeps on the device.

    Each batch's are joined to them in a copy (`EvalLoopContainer`, `eval_do_concat_batches`).

    Args:
        batches: How many batches' outputs it keeps on the device at most.
    """

    def __init__(self, trainer: Any, dtype: torch.dtype | None, batches: int) -> None:
        super().__init__(trainer, dtype)
        self.batches = batches
        self.kept_bytes = 0

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        kept = [self._many(t, self.batches - 1) for t in self._outputs(model, inputs)]
        outputs = self._outputs(model, inputs)
        if self.trainer.args.eval_do_concat_batches:
            joined = [self._many(t, self.batches) for t in outputs]
            self.kept_bytes = sum(t.nbytes for t in joined)
        del kept

    def _many(self, tensor: torch.Tensor, batches: int) -> torch.Tensor:
        return tensor.new_empty(tensor.numel() * batches * self.trainer.accelerator.num_processes)

    def _outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return what the trainer keeps of a batch, as `Trainer.prediction_step` and `evaluation_loop` do."""
        trainer = self.trainer
        with _prepared(model, self.dtype):
            _, outputs = trainer.compute_loss(model, dict(inputs), return_outputs=True)
        ignored = {"loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])}
        named = isinstance(outputs, Mapping)
        logits: Any = tuple(v for k, v in outputs.items() if k not in ignored) if named else outputs[1:]
        logits = logits[0] if len(logits) == 1 else logits
        labels = [inputs[name] for name in trainer.label_names if name in inputs]
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels[0] if len(labels) == 1 else tuple(labels))
        more = dict(inputs) if "inputs" in trainer.args.include_for_metrics else None
        return tensors_of([logits, labels, more])


def _check_evaluations(trainer: Any, fitted: TrainerPlan, workload: Workload, dtype: torch.dtype | None) -> list[str]:
    """Check that evaluations during training fit the budget, where they take more than training; return notes.

    They take more samples at once, or keep the outputs of many batches. An evaluation that only `evaluate()` runs is
    noted where it does not fit.
    """
    args, data, notes = trainer.args, trainer.eval_dataset, []
    is_evaluating = args.eval_strategy != "no" or args.eval_on_start
    # For metrics over all batches; a prediction_step of its own may return anything.
    measures = trainer.compute_metrics is not None and not args.prediction_loss_only and not args.batch_eval_metrics
    keeps = measures and type(trainer).prediction_step is Trainer.prediction_step
    is_larger = args.eval_batch_size > fitted.microbatch_size
    if data is None or not (keeps or (is_evaluating and is_larger)):
        return []
    for name in data if isinstance(data, dict) else [None]:
        with rng_preserved():
            loader = trainer.get_eval_dataloader(name)
            batch = dict(next(iter(loader)))
        of = f" (eval_dataset[{name!r}])" if name is not None else ""
        argument = f"TrainingArguments.per_device_eval_batch_size={args.per_device_eval_batch_size}{of}"
        remedy, loss = None, _Loss(trainer, dtype)
        if keeps and hasattr(loader, "__len__"):
            count = min(len(loader), args.eval_accumulation_steps or len(loader))
            loss = _Evaluation(trainer, dtype, count)
            argument = f"the outputs of {count:,} batches of {argument}, kept on the device by the trainer"
            remedy = (
                "give TrainingArguments(eval_accumulation_steps=1) to move them to the host, a"
                " preprocess_logits_for_metrics to keep less of them, or prediction_loss_only=True"
            )
        try:
            fitted.check_evaluation(workload, batch, loss, argument, remedy)
        except UsageError as e:
            if is_evaluating:
                raise
            notes.append(f"evaluate() would not fit: {e}")
    return notes

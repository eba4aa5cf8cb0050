"""A plan for a step that another library's trainer runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import nn

from memfit import ir, levers
from memfit.errors import PlanError, PlanMismatchError, UsageError
from memfit.foundations import Words, format_bytes
from memfit.hardware import find_device
from memfit.ir import Levers, Plan, Precision, Reduces, Sharding
from memfit.levers import LeversOn, check_plan, sharding_text, switched
from memfit.pipeline import device_kind, plan, plan_given
from memfit.planner import capture_levers, costs_of, predict
from memfit.ranks import SingleProcess, of_engine, once
from memfit.training import LogFunction, LoopLog, evaluation_mode
from memfit.workload import Workload, part_of, shape_text, tensors_of

NAMES: dict[Precision, str] = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""Precisions that these trainers offer, and accelerate's names of them."""

_log = logging.getLogger("memfit")
_MIB = 2**20
_OWN = {
    "optimizers": "the trainer updates the parameters",
    "world_size": "the trainer's engine shares the step among the started ranks",
    "sharding": "the trainer's engine shares the step in its own way",
    "engine": "memfit reads it from the trainer",
}
"""Options of `memfit.plan` that a trainer answers itself, and why."""


class TrainerPlan:
    """A plan's settings for a trainer, and the checkpointing that memfit applies to the model; each interface is one.

    Args:
        workload: The step at the global batch; with several ranks at the batch of one of them, on each.
        engine: How the trainer has ranks share the step; None for one process.
        ranks: The trainer's ranks. The first one plans, and tells the others.
        given: A plan to take instead of making one, or its file; None to make one.
        keeps_precision: Whether the trainer has a precision of its own, so that memfit chooses none.
        log: Takes the first rank's record of each step (`LoopLog`).
        options: Options of `memfit.plan`, `budget` at least.

    Attributes:
        advice: What to do about larger batches, in the words of the interface.
        words: The interface's names of memfit's arguments, for messages and notes.
        microbatch_size: Batch size for the trainer's loader.
        accumulation: Number of microbatches in one update.
        events: What was unusual so far, such as a batch larger than planned: kinds and texts.

    Raises:
        UsageError: An option is the trainer's own affair, or the plan given is not for this trainer. On every rank.
        InfeasibleError: No plan fits the budget. On every rank.
    """

    advice: ClassVar[str] = "plan with Workload.batch as large as any batch, or give smaller ones"
    words: ClassVar[Words] = Words({})

    def __init__(
        self,
        workload: Workload,
        *,
        engine: Sharding | None = None,
        ranks: SingleProcess | None = None,
        given: Plan | Path | str | None = None,
        keeps_precision: bool = False,
        log: LogFunction | None = None,
        **options: Any,
    ) -> None:
        for name in sorted(_OWN.keys() & options.keys()):
            raise UsageError(f"{name}={options[name]!r} is not for a trainer: {_OWN[name]}. Leave it out")
        self._engine, self._ranks = engine, ranks or SingleProcess()
        given = plan_given(given)
        keeps_precision = keeps_precision or (engine is not None and engine.is_fully_sharded)
        options = {
            "device": device_kind(workload.model),
            "precisions": list(NAMES)[: 1 if keeps_precision else 2],
        } | options

        self._device = options["device"]

        def planned() -> bytes:
            made = given or plan(workload, **options, optimizers=(), world_size=1, engine=engine)
            _check(made, workload, engine)
            return ir.codec.encode(made)

        with self.words.spoken():
            made = ir.codec.decode(once(self._ranks, planned), Plan, source="the first rank's plan")
        self.plan: Plan = replace(made, notes=[self.words.of(note) for note in made.notes])
        if self._ranks.rank == 0:
            print(f"memfit: {self.words.of(str(self.plan))}", file=sys.stderr, flush=True)
        self._log = LoopLog(log if self._ranks.rank == 0 else None)
        self.precision = self.plan.levers.precision
        size = self.plan.batch_size
        self.microbatch_size = next(d for d in range(self.plan.levers.microbatch_size, 0, -1) if size % d == 0)
        self.accumulation = size // self.microbatch_size
        self._stack = contextlib.ExitStack()
        batch = workload.batch if self.accumulation == 1 else part_of(workload, workload.batch, 0, self.microbatch_size)
        self._shapes = [tuple(t.shape) for t in tensors_of(batch)]
        self.events: list[tuple[str, str]] = []

    def look(self, given: Any) -> None:
        """Hold what a trainer gives to the model in a step against the batch that was planned for.

        A tensor is larger if it has more rows, or another dimension is larger, than every tensor of the batch with as
        many dimensions; of those that have none such, the number of elements counts. Each size is told once, by the
        log and an event: nothing is promised for it.
        """
        for tensor in tensors_of(given):
            shape = tuple(tensor.shape)
            alike = [known for known in self._shapes if len(known) == len(shape)]
            most = max(map(math.prod, self._shapes), default=0)
            if any(all(a <= b for a, b in zip(shape, known, strict=True)) for known in alike):
                continue
            if not alike and tensor.numel() <= most:
                continue
            self._shapes.append(shape)
            known = max(alike or self._shapes[:-1], key=math.prod, default=())
            text = (
                f"the trainer gives a batch of {shape_text(shape)}, and the plan is for {shape_text(known)}:"
                " the prediction is not valid for it, and the step may exceed"
                f" budget={format_bytes(self.plan.budget_bytes)}. What to do: {self.advice}"
            )
            self.events.append(("larger batch", text))
            _log.warning("larger batch: %s", text)
            return

    def check_evaluation(
        self,
        workload: Workload,
        batch: Any,
        evaluate: Callable[[nn.Module, Any], object],
        argument: str,
        remedy: str | None = None,
    ) -> None:
        """Check that an evaluation fits the plan's budget, between two steps of the training.

        Args:
            evaluate: Evaluates the model on the batch; runs without gradients and in evaluation mode.
            argument: The user's argument for the size of the batch, with its value, for the error.
            remedy: What to do where it does not fit; None for smaller batches.

        Raises:
            UsageError: The evaluation does not fit the budget. On every rank.
        """

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            with evaluation_mode(model):
                evaluate(model, batch)
            # A step of nothing else: it keeps the optimizer's state in memory, and its backward pass needs no more
            # than gradients, which training has too.
            return torch.stack([p.flatten()[0].float() for p in model.parameters() if p.requires_grad]).sum()

        evaluation = dataclasses.replace(workload, batch=batch, loss_fn=loss_fn, batch_size=1)

        smaller = f"evaluate at most {self.microbatch_size} samples at once: they need no more memory than the training"

        def check() -> None:
            device = find_device(self._device)
            trace = capture_levers(evaluation, Levers(precision=self.precision, microbatch_size=1), device)
            trace = of_engine(trace, self._engine)
            prediction, _ = predict(trace, costs_of([trace], device), device)
            if prediction.peak_upper_bytes > self.plan.budget_bytes:
                raise UsageError(
                    f"{argument}: an evaluation needs {format_bytes(prediction.peak_upper_bytes)} at its peak, more"
                    f" than budget={format_bytes(self.plan.budget_bytes)}: {remedy or smaller}, or raise budget="
                )

        once(self._ranks, check)

    def checkpoint(self, model: nn.Module) -> None:
        """Checkpoint the plan's regions of a model, and apply its lean modules and chunked loss, until `close`."""
        self.close()
        self._stack.enter_context(switched(model, self.plan.levers))
        self._stack.callback(model.register_forward_pre_hook(self._called, with_kwargs=True).remove)

    def _called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and model.training:
            self.look((args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerPlan:
        return self  # a copy of a model that was left under a plan has its hook

    def close(self) -> None:
        """Undo `checkpoint`."""
        self._stack.close()


def _check(made: Plan, workload: Workload, engine: Sharding | None) -> None:
    """Check that a plan is for a trainer's step, and that nothing in it is the trainer's own."""
    check_plan(made, workload)
    if made.engine != engine:
        raise PlanMismatchError(
            f"plan= was made for {_shown(made.engine)}, and the trainer has {_shown(engine)}: make a plan under this"
            " trainer, with budget="
        )
    if made.levers.sharding is not None:
        raise PlanError(
            f"plan= shares the step over {made.levers.sharding.world_size} ranks by memfit's own engine"
            " (levers.sharding), and the trainer uses another: make a plan under this trainer, with budget="
        )
    for lever in levers.registry.used_levers(LeversOn(made.levers, made.batch_size)):
        if lever in levers.registry.UPDATES:
            raise PlanError(f"plan= uses {lever.name}, and {_OWN['optimizers']}: make a plan with optimizers=()")
    if made.levers.precision not in NAMES:
        raise PlanError(
            f"this trainer has no precision {made.levers.precision!r}: give precisions= of {', '.join(NAMES)}"
        )


def data_parallel(world_size: int, arguments: Mapping[str, Any], *, reduces: Reduces = "last") -> Sharding:
    """Return DistributedDataParallel with some arguments, as another library makes it."""
    cap = arguments.get("bucket_cap_mb")
    views = bool(arguments.get("gradient_as_bucket_view"))
    sharding = Sharding(world_size=world_size, mode="ddp", reduces=reduces, gradient_as_bucket_view=views)
    if cap is None:
        return sharding
    cap_bytes = int(cap * _MIB)  # which is then that of the first bucket too
    return replace(sharding, bucket_cap_bytes=cap_bytes, first_bucket_bytes=cap_bytes)


def _shown(engine: Sharding | None) -> str:
    return "one process" if engine is None else sharding_text(engine)


def check_budget(budget: object, given: object) -> None:
    """Check that there is a budget to make a plan for, or a plan.

    Raises:
        UsageError: There are none or both.
    """
    if (budget is None) == (given is None):
        raise UsageError(f"budget={budget!r} and plan={'None' if given is None else '...'}: give one of the two")

"""Runs a step of the user's own loop again from its tape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.batch import leaves_of
from memfit.ir.trace import Phase
from memfit.tape import BatchTensor, Entry, ExecutionContext, LoopWorkload, ModuleTensor, Reference, ResultTensor
from memfit.training.step import Step, StepOptions, StepResult

Tensors = dict[int, torch.Tensor]


class TapedStep(Step):
    """A training step that replays a tape, with the modules, optimizer and tensors of a workload.

    It checks, clips and scales nothing by itself: where the loop does, the tape holds it. It returns no results: it
    runs to be captured.

    Args:
        autocast: Returns the autocast context of forward passes; used where the loop has none of its own.
    """

    def __init__(
        self, workload: LoopWorkload, autocast: Callable[[], AbstractContextManager[object]] | None = None
    ) -> None:
        super().__init__(workload, StepOptions(autocast=autocast))
        self.tape = workload.tape
        self._left: Tensors = {}
        self._roots = [workload.model.get_submodule(name) for name in self.tape.roots]
        self._named = [
            {**dict(root.named_buffers(remove_duplicate=False)), **dict(root.named_parameters(remove_duplicate=False))}
            for root in self._roots
        ]
        optimizer = workload.optimizer
        self._optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])

    def __call__(self, batch: Any) -> StepResult:
        """Run the step once, on the tensors of a batch."""
        self._phase("optimizer", 0)
        tensors, self._left = self._left, {}
        self._play(self.tape.entries, tensors, batch, tells=True)
        self._left = tensors  # the loop's variables, which the next step rebinds
        return StepResult(math.nan, math.nan, False, 1.0, math.nan, None)

    def split(self, batch: Any) -> list[Any]:
        """Return the tensors that each forward pass begins with: the batch, and earlier results of the step.

        The step runs up to the last forward pass: it may use results made after an earlier backward pass, such as noise
        for a generator, or a running mean of losses.
        """
        parameters = [p for root in self._roots for p in root.parameters()]
        gradients = [p.grad for p in parameters]
        tensors: Tensors = {}
        microbatches = []
        begun = 0
        for index in range(self.tape.passes):
            begins = self._begin_of(index)
            self._play(self.tape.entries[begun:begins], tensors, batch)
            begun = begins
            microbatches.append((index, dict(tensors), batch))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return microbatches

    def compute_loss(self, microbatch: Any) -> Any:
        """Run one forward pass, and return the tensors that the loop holds after it."""
        index, tensors, batch = microbatch
        tensors = dict(tensors)
        self._play(self._forward(index), tensors, batch)
        return tensors

    def gradients(self, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Run the step once, for observers of its forward and backward passes; return no gradients."""
        self(batch)
        return math.nan, {}

    def _forward(self, index: int) -> list[Entry]:
        """Return the entries of the forward pass before a backward pass."""
        return [entry for entry in self.tape.entries if entry.phase == "forward" and entry.microbatch == index]

    def _begin_of(self, index: int) -> int:
        """Return the position of a forward pass's first entry; of the backward pass where it has none."""
        of_pass = (entry.microbatch == index and entry.phase in ("forward", "backward") for entry in self.tape.entries)
        return next(i for i, is_of_pass in enumerate(of_pass) if is_of_pass)

    def _play(self, entries: Iterable[Entry], tensors: Tensors, batch: Any, tells: bool = False) -> None:
        phase: tuple[Phase, int] = ("optimizer", 0)
        context: ExecutionContext | None = None
        with contextlib.ExitStack() as stack:
            for entry in entries:
                if tells and (entry.phase, entry.microbatch) != phase:
                    phase = entry.phase, entry.microbatch
                    self._phase(*phase)
                if entry.context != context:
                    stack.close()
                    stack.enter_context(self._entered(entry))
                    context = entry.context
                self._do(entry, tensors, batch)

    def _entered(self, entry: Entry) -> AbstractContextManager[object]:
        contexts = contextlib.ExitStack()
        if entry.phase == "forward" and not entry.context.autocast:
            contexts.enter_context(self.autocast())
        contexts.enter_context(entry.context.entered())
        return contexts

    def _do(self, entry: Entry, tensors: Tensors, batch: Any) -> None:
        if entry.kind == "update":
            self._optimizers[entry.what].step()
        else:
            call = self._roots[entry.what] if entry.kind == "module" else entry.what
            args, kwargs = entry.arguments.filled(lambda reference: self._tensor(reference, tensors, batch))
            results = leaves_of(call(*args, **kwargs))
            del args, kwargs
            tensors.update(zip(entry.made, results, strict=True))
            del results
        for number in entry.drops:
            tensors.pop(number, None)

    def _tensor(self, reference: Reference, tensors: Tensors, batch: Any) -> torch.Tensor:
        if isinstance(reference, ResultTensor):
            return tensors[reference.number]
        if isinstance(reference, ModuleTensor):
            return self._named[reference.root][reference.name]
        assert isinstance(reference, BatchTensor)
        tensor: torch.Tensor = batch[reference.index]
        return tensor


class CombinedOptimizers:
    """The optimizers of a loop, left unchanged, as one with all their parameters; the tape steps each by itself."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all optimizers."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def step(self) -> None:
        """Step each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

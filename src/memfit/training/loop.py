"""Steps of the user's own loop: as `Workload.loop` describes it, or run again from its tape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from memfit._torch import tree_map
from memfit.ir import Phase
from memfit.training.optimizers import parameters_of
from memfit.training.step import Step, StepOptions, StepResult
from memfit.workload import (
    BatchTensor,
    Entry,
    ExecutionContext,
    Loop,
    LoopWorkload,
    ModuleTensor,
    Reference,
    ResultTensor,
    Workload,
    leaves_of,
    samples_of,
)

_NO_RESULT = StepResult(math.nan, math.nan, False, 1.0, math.nan, None)


class DescribedLoop(Step):
    """A step that runs a workload in the order of the user's loop, without memfit's checks.

    It returns no results: it runs to be captured.
    """

    def __init__(self, workload: Workload, options: StepOptions, loop: Loop) -> None:
        super().__init__(workload, options)
        self.loop = loop
        self._outputs: Any = None
        self._loss: torch.Tensor | None = None
        self._inputs: Any = None

    def compute_loss(self, microbatch: Any) -> Any:
        """Run the forward pass as the loop does."""
        return super().compute_loss(self._as_inputs(microbatch))

    def __call__(self, batch: Any) -> StepResult:
        """Run one step."""
        loop, scaler = self.loop, self.scaler if self.loop.scales_loss else None
        self._phase("optimizer", 0)
        if loop.zero_grad == "before-forward":
            self._zero_gradients()
        samples = samples_of(self.workload, batch)
        for index, microbatch in enumerate(self.split(batch)):
            self._phase("forward", index)
            self._inputs = None
            self._inputs = inputs = self._as_inputs(microbatch)
            self._loss = self._mean_loss(inputs, samples_of(self.workload, microbatch) / samples)
            if loop.zero_grad == "after-forward" and index == 0:
                self._zero_gradients()
            self._phase("backward", index)
            with self.autocast() if loop.autocast_backward else nullcontext():
                (self._loss if scaler is None else scaler.scaled(self._loss)).backward(retain_graph=loop.retain_graph)
            if loop.holds_outputs in ("", "backward"):
                self._outputs = self._loss = None
            del inputs
        self._phase("optimizer", 0)
        updated = parameters_of(self.workload.optimizer)
        if scaler is not None:
            scaler.unscale([p.grad for p in updated if p.grad is not None])
        if self.workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(updated, self.workload.max_grad_norm)
        self.update_parameters()
        if loop.zero_grad == "after-step":
            self._zero_gradients()
        if loop.holds_outputs == "step":
            self._outputs = self._loss = None
        return _NO_RESULT

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the model's outputs alive while the context is entered, as a variable of the loop does."""
        if not self.loop.holds_outputs:
            yield
            return
        with self.workload.model.register_forward_hook(self._keep):
            try:
                yield
            finally:
                self._outputs = self._loss = None

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs = output

    def _mean_loss(self, inputs: Any, share: float) -> torch.Tensor:
        """Return the loss that the loop runs backward on: a microbatch's mean, times its share of the batch."""
        loss, count = super().compute_loss(inputs)
        mean = loss if count is None else loss / count
        return mean if share == 1 else mean * share

    def _zero_gradients(self) -> None:
        """Drop the gradients of every parameter, or fill them with zeros, as `Module.zero_grad` does."""
        for parameter in self.parameters():
            if not self.loop.set_to_none and parameter.grad is not None:
                parameter.grad.detach_().zero_()
            else:
                parameter.grad = None

    def _as_inputs(self, microbatch: Any) -> Any:
        """Return a microbatch whose floating-point tensors require gradients, where the loop's do."""
        return tree_map(_requiring_gradient, microbatch) if self.loop.inputs_require_grad else microbatch


def _requiring_gradient(leaf: Any) -> Any:
    is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if is_floating else leaf


TensorsByNumber = dict[int, torch.Tensor]


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
        self._left: TensorsByNumber = {}
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
        return _NO_RESULT

    def split(self, batch: Any) -> list[Any]:
        """Return the tensors that each forward pass begins with: the batch, and earlier results of the step.

        The step runs up to the last forward pass: it may use results made after an earlier backward pass, such as noise
        for a generator, or a running mean of losses.
        """
        parameters = [p for root in self._roots for p in root.parameters()]
        gradients = [p.grad for p in parameters]
        tensors: TensorsByNumber = {}
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
        forward = [e for e in self.tape.entries if e.phase == "forward" and e.microbatch == index]
        self._play(forward, tensors, batch)
        return tensors

    def gradients(self, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Run the step once, for observers of its forward and backward passes; return no gradients."""
        self(batch)
        return math.nan, {}

    def _begin_of(self, index: int) -> int:
        """Return the position of a forward pass's first entry; of the backward pass where it has none."""
        of_pass = (entry.microbatch == index and entry.phase in ("forward", "backward") for entry in self.tape.entries)
        return next(i for i, is_of_pass in enumerate(of_pass) if is_of_pass)

    def _play(self, entries: Iterable[Entry], tensors: TensorsByNumber, batch: Any, tells: bool = False) -> None:
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

    def _do(self, entry: Entry, tensors: TensorsByNumber, batch: Any) -> None:
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

    def _tensor(self, reference: Reference, tensors: TensorsByNumber, batch: Any) -> torch.Tensor:
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

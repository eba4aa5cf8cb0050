"""A step of the user's own loop, run again from its tape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.batch import leaves_of
from memfit.ir.trace import Phase
from memfit.tape import Entry, Given, Held, LoopWorkload, Made, Reference, Surroundings, root_of
from memfit.train.step import Step, StepResult

Tensors = dict[int, torch.Tensor]


class TapedStep(Step):
    """A training step that does what a tape says, with the modules, optimizer and tensors of a workload.

    It checks, clips and scales nothing by itself: where the loop does, the tape has it. It returns nothing that it
    computes; it is there to be watched.

    Args:
        workload: The workload, with its tape.
        autocast: Makes the context of what the forward passes do, where the loop has none of its own.
    """

    def __init__(
        self, workload: LoopWorkload, autocast: Callable[[], AbstractContextManager[object]] | None = None
    ) -> None:
        super().__init__(workload, autocast=autocast)
        self.tape = workload.tape
        self._left: Tensors = {}
        roots = [root_of(workload.model, name) for name in self.tape.roots]
        self._named = [
            {**dict(root.named_buffers(remove_duplicate=False)), **dict(root.named_parameters(remove_duplicate=False))}
            for root in roots
        ]
        self._roots = roots
        optimizer = workload.optimizer
        self._optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])

    def __call__(self, batch: Any) -> StepResult:
        """Run the step once, on the tensors of a batch."""
        self._phase("optimizer", 0)
        tensors, self._left = self._left, {}
        self._play(self.tape.entries, tensors, batch, tells=True)
        self._left = tensors  # names of the loop, which the next step gives to others
        return StepResult(math.nan, math.nan, False, 1.0, math.nan, None)

    def split(self, batch: Any) -> list[Any]:
        """Return what each forward pass begins with: the batch, and what the step made before it."""
        tensors: Tensors = {}
        found = []
        for index in range(self.tape.passes):
            found.append((index, dict(tensors), batch))
            if index + 1 < self.tape.passes:
                self._play(self._forward(index), tensors, batch)
        return found

    def compute_loss(self, microbatch: Any) -> Any:
        """Run one forward pass, and return what the loop holds after it."""
        index, tensors, batch = microbatch
        tensors = dict(tensors)
        self._play(self._forward(index), tensors, batch)
        return tensors

    def gradients(self, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Run the step once, for whoever looks at its forward and backward passes; return no gradients."""
        self(batch)
        return math.nan, {}

    def _forward(self, index: int) -> list[Entry]:
        """Return the entries of the forward pass before a backward pass."""
        return [entry for entry in self.tape.entries if entry.phase == "forward" and entry.microbatch == index]

    def _play(self, entries: Iterable[Entry], tensors: Tensors, batch: Any, tells: bool = False) -> None:
        phase: tuple[Phase, int] = ("optimizer", 0)
        surroundings: Surroundings | None = None
        with contextlib.ExitStack() as stack:
            for entry in entries:
                if tells and (entry.phase, entry.microbatch) != phase:
                    phase = entry.phase, entry.microbatch
                    self._phase(*phase)
                if entry.surroundings != surroundings:
                    stack.close()
                    stack.enter_context(self._entered(entry))
                    surroundings = entry.surroundings
                self._do(entry, tensors, batch)

    def _entered(self, entry: Entry) -> AbstractContextManager[object]:
        own = entry.surroundings.entered()
        if self._autocast is None or entry.surroundings.autocast or entry.phase != "forward":
            return own
        both = contextlib.ExitStack()
        both.enter_context(self._autocast())
        both.enter_context(own)
        return both

    def _do(self, entry: Entry, tensors: Tensors, batch: Any) -> None:
        if entry.kind == "update":
            self._optimizers[entry.what].step()
        else:
            call = self._roots[entry.what] if entry.kind == "module" else entry.what
            args, kwargs = entry.arguments.filled(lambda reference: self._tensor(reference, tensors, batch))
            made = leaves_of(call(*args, **kwargs))
            del args, kwargs
            tensors.update(zip(entry.made, made, strict=True))
            del made
        for number in entry.drops:
            tensors.pop(number, None)

    def _tensor(self, reference: Reference, tensors: Tensors, batch: Any) -> torch.Tensor:
        if isinstance(reference, Made):
            return tensors[reference.number]
        if isinstance(reference, Held):
            return self._named[reference.root][reference.name]
        assert isinstance(reference, Given)
        given: torch.Tensor = batch[reference.index]
        return given


class Together:
    """Several optimizers of a loop, as one that has all their parameters; each is stepped by the tape.

    Args:
        optimizers: The loop's own. Nothing of them is changed.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def step(self) -> None:
        """Take a step with each."""
        for optimizer in self.optimizers:
            optimizer.step()

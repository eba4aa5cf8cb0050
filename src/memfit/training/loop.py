"""Runs a step of the user's own loop again, from its tape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.ir import Phase
from memfit.workload import (
    BatchTensor,
    Entry,
    ExecutionContext,
    LoopWorkload,
    ModuleTensor,
    Reference,
    ResultTensor,
    leaves_of,
)

TensorsByNumber = dict[int, torch.Tensor]


class TapePlayer:
    """Runs the tape of a workload, with its modules, optimizer and tensors.

    Args:
        autocast: Makes the autocast context of forward passes; used where the loop has none of its own.
    """

    def __init__(self, workload: LoopWorkload, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self._tape, self._autocast = workload.tape, autocast
        self._left: TensorsByNumber = {}
        self._roots = [workload.model.get_submodule(name) for name in self._tape.roots]
        self._named = [
            {**dict(root.named_buffers(remove_duplicate=False)), **dict(root.named_parameters(remove_duplicate=False))}
            for root in self._roots
        ]
        optimizer = workload.optimizer
        self._optimizers: list[Any] = getattr(optimizer, "optimizers", [optimizer])

    def step(self, batch: Any, on_phase: Callable[[Phase, int], None]) -> None:
        """Run the step once, on the tensors of a batch."""
        on_phase("optimizer", 0)
        tensors, self._left = self._left, {}
        self._play(self._tape.entries, tensors, batch, on_phase)
        self._left = tensors  # the loop's variables, which the next step rebinds

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
        for index in range(self._tape.passes):
            of_pass = (e.microbatch == index and e.phase in ("forward", "backward") for e in self._tape.entries)
            begins = next(i for i, is_of_pass in enumerate(of_pass) if is_of_pass)
            self._play(self._tape.entries[begun:begins], tensors, batch)
            begun = begins
            microbatches.append((index, dict(tensors), batch))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return microbatches

    def forward(self, microbatch: Any) -> TensorsByNumber:
        """Run one forward pass, and return the tensors that the loop holds after it."""
        index, tensors, batch = microbatch
        tensors = dict(tensors)
        forward = [e for e in self._tape.entries if e.phase == "forward" and e.microbatch == index]
        self._play(forward, tensors, batch)
        return tensors

    def _play(
        self,
        entries: Iterable[Entry],
        tensors: TensorsByNumber,
        batch: Any,
        on_phase: Callable[[Phase, int], None] | None = None,
    ) -> None:
        phase: tuple[Phase, int] = ("optimizer", 0)
        context: ExecutionContext | None = None
        with contextlib.ExitStack() as stack:
            for entry in entries:
                if on_phase is not None and (entry.phase, entry.microbatch) != phase:
                    phase = entry.phase, entry.microbatch
                    on_phase(*phase)
                if entry.context != context:
                    stack.close()
                    if entry.phase == "forward" and not entry.context.autocast:
                        stack.enter_context(self._autocast())
                    stack.enter_context(entry.context.entered())
                    context = entry.context
                self._do(entry, tensors, batch)

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

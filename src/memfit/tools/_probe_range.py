"""Would a step's numbers fit fp16? One forward and backward pass over real batches, watched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit._torch import EagerMode, current_graph_task_id, undone_by_exceptions
from memfit.capture import nothing_changes, real_copy
from memfit.errors import UsageError
from memfit.foundations import Progress, silent
from memfit.hardware import find_device
from memfit.ir import Levers, RangeReport, ValueStatistics, range_report
from memfit.levers import applied, check_workload
from memfit.pipeline import checked, device_kind, first_batches
from memfit.workload import Loss, Workload, samples_of, tensors_of

_BLANK = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)
"""Operators that return uninitialized memory."""


@checked
def probe_range(
    workload: Workload, *, batches: int = 1, microbatch_size: int | None = None, progress: Progress = silent
) -> RangeReport:
    """Find the modules with activations or gradients outside fp16's range or flushed to zero, and give advice.

    Runs forward and backward passes in bf16-mixed, on a copy of the workload as it is: probe again after some
    training, since ranges move.

    Args:
        workload: With data; nothing of it is changed. `fp32_modules` are left out, so that a recommendation can be
            tried out by probing again with it.
        batches: How many of the workload's first batches to run (> 0).
        microbatch_size: Samples in one forward and backward pass (> 0); None for the whole batch.
        progress: Told how many batches are done, of how many.

    Raises:
        UsageError: `batches` is not above 0, or a plan is applied to the workload.
    """
    if batches < 1:
        raise UsageError(f"batches={batches} is not above 0: give the number of batches to check")
    kind = device_kind(workload.model)
    check_workload(workload, find_device(kind))
    levers = Levers(precision="bf16-mixed", microbatch_size=microbatch_size or samples_of(workload))
    copied = real_copy(workload)
    ranges = RangeObserver(copied.model)

    def loss_fn(model: nn.Module, batch: Any) -> Loss:
        loss = workload.loss_fn(model, batch)
        ranges.follow("", loss)
        return loss

    copied = dataclasses.replace(copied, loss_fn=loss_fn)
    with nothing_changes(workload) as around, applied(levers, copied) as step:
        progress = around.outside(progress)
        progress("probe", 0, batches)
        for index, batch in enumerate(first_batches(workload, batches)):
            with ranges:
                step.gradients(batch)
            progress("probe", index + 1, batches)
    return range_report(*ranges.seen())


class RangeObserver(EagerMode):
    """A dispatch mode that notes the bf16 numbers of every module's forward pass, and of its gradients.

    Enter it around forward and backward passes in bf16-mixed. Autocast has the same tensors in 16 bits there as in
    16-mixed, and bf16 has the range of fp32: numbers that fp16 would overflow or flush to zero keep their values.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activations = {name: ExponentSums() for name, _ in model.named_modules()}
        self.gradients = {name: ExponentSums() for name, _ in model.named_modules()}
        self._model = model
        self._running = [""]
        self._is_noting = False
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> RangeObserver:
        def begun() -> Callable[[], None]:
            return functools.partial(self._running.__delitem__, slice(len(self._running), None))

        for name, module in self._model.named_modules():
            self._handles.callback(module.register_forward_pre_hook(functools.partial(self._begin, name)).remove)
            self._handles.callback(module.register_forward_hook(self._end, always_call=True).remove)
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    handle = parameter.register_hook(functools.partial(self._see_parameter, name))
                    self._handles.callback(handle.remove)
        self._handles.enter_context(undone_by_exceptions(self._model, begun))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._handles.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_blank = func.overloadpacket in _BLANK
        if not is_blank and not self._is_noting and current_graph_task_id() == -1:
            self._note(out)
        return out

    def seen(self) -> tuple[dict[str, ValueStatistics], dict[str, ValueStatistics]]:
        """Return the ranges of activations and of gradients, of the modules with any in bf16."""
        used = [name for name, numbers in self.activations.items() if numbers.count]
        return {n: self.activations[n].seen() for n in used}, {n: self.gradients[n].seen() for n in used}

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._running.append(name)
        self._note(args)

    def _end(self, module: nn.Module, args: Any, out: Any) -> None:
        self.follow(self._running.pop(), out)

    def follow(self, name: str, value: Any) -> None:
        """Note the gradients of the tensors in a value as a module's."""
        for tensor in tensors_of(value):
            if tensor.dtype is torch.bfloat16 and tensor.requires_grad:
                tensor.register_hook(self.gradients[name].add)

    def _note(self, value: Any) -> None:
        self._is_noting = True
        try:
            for tensor in tensors_of(value):
                if tensor.dtype is torch.bfloat16:
                    self.activations[self._running[-1]].add(tensor)
        finally:
            self._is_noting = False

    def _see_parameter(self, name: str, gradient: torch.Tensor) -> None:
        if self.activations[name].count and not gradient.is_sparse:
            self.gradients[name].add(gradient)


class ExponentSums:
    """Sums of absolute values by binary exponent, with the largest value and the number of non-finite ones."""

    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.largest = 0.0
        self.sums: dict[int, float] = defaultdict(float)

    def add(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            values = tensor.float().abs()
            finite = values[torch.isfinite(values) & (values > 0)]
            self.count += values.numel()
            self.not_finite += int((~torch.isfinite(values)).sum())
            if finite.numel():
                self.largest = max(self.largest, float(finite.max()))
                exponents, inverse = torch.frexp(finite).exponent.unique(return_inverse=True)
                sums = torch.zeros(len(exponents), dtype=torch.double, device=finite.device)
                sums.index_add_(0, inverse, finite.double())
                for exponent, total in zip((exponents - 1).tolist(), sums.tolist(), strict=True):
                    self.sums[exponent] += total

    def seen(self) -> ValueStatistics:
        return ValueStatistics(largest=self.largest, not_finite=self.not_finite, sums=dict(self.sums))

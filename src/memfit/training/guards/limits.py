"""The bytes of a step: by category, predicted and measured, their limits, and a check for free memory.

A step fails before it exceeds its limit. On accelerators PyTorch's allocator keeps the limit itself. Its allocator for
the CPU can't, and the operating system counts something else: `RLIMIT_AS` limits address space, which the C library
keeps after tensors are freed. So on the CPU a dispatch mode adds up the storages alive, and the new bytes of each
operator, known since its first call with arguments of these shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch

from memfit import hardware
from memfit._torch import EagerMode, FakeTensorMode, storage_key_of, tree_leaves, tree_map
from memfit.errors import MemoryLimitError
from memfit.foundations import format_bytes
from memfit.hardware import free_bytes, out_of_memory
from memfit.ir import BETWEEN_STEPS
from memfit.training.optimizers import parameters_of, state_of
from memfit.workload import signature, tensors_of

if TYPE_CHECKING:
    from memfit.training.step import Step

IN_THE_STEP = "in the step"
"""Category of bytes alive only while a step runs: gradients, activations, temporaries, workspaces."""

Named = Callable[[Any], Mapping[str, Iterable[torch.Tensor]]]
"""Returns the tensors that a step holds when it begins on a batch, by category."""


class _LiveStorage(weakref.ref[Any]):
    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class _StepLimit:
    def __init__(self, limit_bytes: int, named: Named) -> None:
        super().__init__()
        self.limit_bytes, self._named = limit_bytes, named
        self._batch: Any = None

    def __call__(self, batch: Any) -> Self:
        """Return this limit, to be entered around a step on a batch."""
        self._batch = batch
        return self

    def _error(self, held_bytes: int, requested_bytes: int, where: str) -> MemoryLimitError:
        by_category = held_by_category(self._named(self._batch))
        by_category["activations and temporaries"] = held_bytes - sum(by_category.values())
        ledger = ", ".join(f"{name} {format_bytes(count)}" for name, count in by_category.items() if count)
        return MemoryLimitError(
            f"the step would exceed limit_bytes={self.limit_bytes} ({format_bytes(self.limit_bytes)}):"
            f" {format_bytes(held_bytes)} are allocated ({ledger}), and {where} needs {format_bytes(requested_bytes)}"
            " more. Nothing was updated. Raise limit_bytes=, or make a plan with a lower budget=",
            limit_bytes=self.limit_bytes,
            held_bytes=held_bytes,
            requested_bytes=requested_bytes,
            by_category=by_category,
            where=where,
        )


class CpuLimit(_StepLimit, EagerMode):
    """A limit on the CPU: the operator that would exceed it fails before it runs. Enter it around every step.

    It counts the storages of operators' outputs, those of `named`, and operators' workspaces as `workspace_bytes`
    knows them.

    Args:
        workspace_bytes: Returns the bytes that a call allocates inside, by its `memfit.workload.signatures`.
        as_run: Maps an operator and its arguments, as a mode sees them, to those that run without a mode.

    Attributes:
        peak_bytes: Most bytes held since the mode was last entered.
        has_looked_up: Whether calls since then had unknown bytes, whose computation takes time.
    """

    active: CpuLimit | None = None

    def __init__(
        self,
        limit_bytes: int,
        named: Named,
        workspace_bytes: Callable[[str], int] = lambda text: 0,
        as_run: Callable[[Any, Any, Any], tuple[Any, Any]] = lambda func, args, kwargs: (func, args),
    ) -> None:
        super().__init__(limit_bytes, named)
        self.held_bytes = self.peak_bytes = 0
        self._workspace_bytes, self._as_run = workspace_bytes, as_run
        self.has_looked_up = False
        self._held: dict[int, _LiveStorage] = {}
        self._needed: dict[Any, tuple[int, int]] = {}
        self._outer: CpuLimit | None = None

    def __enter__(self) -> CpuLimit:
        for tensors in self._named(self._batch).values():
            for tensor in tensors:
                self._hold(tensor)
        self.peak_bytes, self.has_looked_up = self.held_bytes, False
        self._outer, CpuLimit.active = CpuLimit.active, self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for tensor in tensors_of(self._batch):  # the batch may live longer, but not on the step's account
            held = self._held.get(storage_key_of(tensor))
            if held is not None:
                self._freed(held)
        CpuLimit.active, self._batch = self._outer, None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func, args = self._as_run(func, args, kwargs)
        output_bytes, workspace_bytes = self._need(func, args, kwargs)
        total = self.held_bytes + output_bytes + workspace_bytes
        if total > self.limit_bytes:
            raise self._error(self.held_bytes, output_bytes + workspace_bytes, str(func))
        self.peak_bytes = max(self.peak_bytes, total)
        out = func(*args, **kwargs)
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            self._hold(tensor)
        return out

    def _hold(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key in self._held:
            return
        held = _LiveStorage(storage, self._freed)
        held.key, held.nbytes = key, storage.nbytes()
        self._held[key] = held
        self.held_bytes += held.nbytes

    def _freed(self, held: Any) -> None:
        if self._held.pop(held.key, None) is not None:
            self.held_bytes -= held.nbytes

    def _need(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        """Return the bytes of a call's new output storages, from a run under fake tensors, and of its workspaces."""
        key = _key(func, args, kwargs)
        needed = None if key is None else self._needed.get(key)
        if needed is not None:
            return needed
        self.has_looked_up = True
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        arguments = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        detached = [(id(t), t.detach()) for t in arguments]  # else fakes would be made of their gradients too
        try:
            fakes = {name: mode.from_tensor(t, static_shapes=True) for name, t in detached}
            with mode:
                swapped = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
                out = func(*swapped[0], **swapped[1])
        except Exception:  # the shape depends on values: assume an output as large as the largest input
            made_bytes = max((t.nbytes for t in arguments), default=0)
        else:
            before = {storage_key_of(fake) for fake in fakes.values()}
            outputs = {storage_key_of(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
            made = (t for key, t in outputs.items() if key not in before and t.layout is torch.strided)
            made_bytes = sum(int(t.untyped_storage().nbytes()) for t in made)
        needed = made_bytes, self._workspace_bytes(signature(func, args, kwargs))
        if key is not None:
            self._needed[key] = needed
        return needed


class AcceleratorLimit(_StepLimit):
    """A limit on an accelerator, kept by PyTorch's allocator. Enter it around every step.

    It counts the bytes that the allocator reserves, which it takes from the device.
    """

    def __init__(self, limit_bytes: int, named: Named, device: torch.device) -> None:
        super().__init__(limit_bytes, named)
        self.device, self._fraction, self._before = device, hardware.accelerators.MemoryFraction(device), 1.0

    def __enter__(self) -> AcceleratorLimit:
        self._before = self._fraction.get()
        self._fraction.set(min(self._before, self.limit_bytes / self._fraction.total_bytes))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._fraction.set(self._before)
        record = None if error is None else out_of_memory(error)
        try:
            if record is not None and record.kind == "allocator":
                held_bytes = hardware.accelerators.allocated_bytes(self.device)
                raise self._error(held_bytes, record.requested_bytes or 0, "an operator") from error
        finally:
            self._batch = None


def held_by_category(named: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, int]:
    """Return the bytes of tensors' storages by category; a storage in two categories counts in the first."""
    seen: set[int] = set()
    by_category: dict[str, int] = {}
    for category, tensors in named.items():
        storages = {storage_key_of(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
        by_category[category] = sum(nbytes for key, nbytes in storages.items() if key not in seen)
        seen |= storages.keys()
    return by_category


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a key of the arguments that determine a call's bytes; None where they can't be hashed."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.dtype)
        elif isinstance(value, list | tuple):
            parts.append(tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in value))
        elif not isinstance(value, float):  # no size depends on floats, and optimizers pass a new one in each step
            parts.append(value)
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


# The ledger


@dataclass(frozen=True)
class Ledger:
    """The bytes of a step by category; `print` shows a table.

    Attributes:
        steps: Number of optimizer updates done.
        predicted_bytes: The plan's predicted bytes at the peak, by category; empty where it has none.
        measured_bytes: Bytes held now, by category; "in the step" are the bytes beyond them at the last step's peak,
            where it was measured: on a GPU since its peak was last reset, on the CPU under a limit.
        predicted_peak_bytes: Predicted peak; None without a plan.
        peak_bytes: Measured peak; None where it was not measured.
        limit_bytes: The step's limit; None without.
        reserved_bytes: Most bytes that PyTorch's allocator took from the GPU; None on the CPU.
        allocation_retries: How often the GPU's allocator released its cache and retried an allocation: each retry
            stops the GPU, and is a sign that memory runs out. None on the CPU.
        host_bytes: Host memory of this process (resident set).
        host_free_bytes: Host memory left for this process, within its control group's limit.
        pinned_bytes: Page-locked host memory of PyTorch's allocator; None if unknown.
    """

    steps: int
    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    predicted_peak_bytes: int | None
    peak_bytes: int | None
    limit_bytes: int | None
    reserved_bytes: int | None
    allocation_retries: int | None
    host_bytes: int
    host_free_bytes: int
    pinned_bytes: int | None

    @property
    def warnings(self) -> list[str]:
        """Signs that memory runs out."""
        warnings = []
        if self.allocation_retries:
            warnings.append(
                f"the allocator released its cache and retried {self.allocation_retries} times. Each retry stops the"
                " GPU: make a plan with a lower budget="
            )
        if self.limit_bytes and self.peak_bytes and self.peak_bytes > 0.98 * self.limit_bytes:
            warnings.append(f"the step is within 2 % of limit_bytes={self.limit_bytes}")
        if self.host_free_bytes < 0.05 * (self.host_free_bytes + self.host_bytes):
            warnings.append(f"the host has {format_bytes(self.host_free_bytes)} free for this process")
        return warnings

    def __str__(self) -> str:
        def text(count: int | None) -> str:
            return "" if count is None else format_bytes(count)

        rows = [("", "predicted", "measured")]
        for name in [*self.measured_bytes, *(n for n in self.predicted_bytes if n not in self.measured_bytes)]:
            rows.append((name, text(self.predicted_bytes.get(name)), text(self.measured_bytes.get(name))))
        rows.append(("peak", text(self.predicted_peak_bytes), text(self.peak_bytes)))
        singles = {
            "limit": self.limit_bytes,
            "reserved": self.reserved_bytes,
            "this process on the host": self.host_bytes,
            "free on the host": self.host_free_bytes,
            "pinned": self.pinned_bytes,
        }
        rows += [(name, "", text(value)) for name, value in singles.items() if value is not None]
        lines = [f"{name:26}{predicted:>14}{measured:>14}" for name, predicted, measured in rows]
        return "\n".join([f"Memory after step {self.steps}", *lines, *(f"Warning: {w}" for w in self.warnings)])


def ledger_of(step: Step) -> Ledger:
    """Measure the ledger of a step."""
    held = held_by_category(held_tensors(step, step.workload.batch))
    held.pop("gradients", None)
    peaks = hardware.accelerators.peaks(device_of(step))
    peak_bytes = None if peaks is None else peaks.allocated_bytes
    if peaks is None and isinstance(step.limit, CpuLimit):
        peak_bytes = step.limit.peak_bytes or None
    if peak_bytes is not None:
        held[IN_THE_STEP] = peak_bytes - sum(held.values())
    pinned = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else None
    predicted: Mapping[str, int] = {} if step.options.prediction is None else step.options.prediction.by_category
    between_steps: dict[str, int] = {name: predicted.get(name, 0) for name in BETWEEN_STEPS} if predicted else {}
    in_the_step = {IN_THE_STEP: sum(predicted.values()) - sum(between_steps.values())} if predicted else {}
    return Ledger(
        steps=step.steps,
        predicted_bytes={**between_steps, **in_the_step},
        measured_bytes=held,
        predicted_peak_bytes=step.options.predicted_peak_bytes,
        peak_bytes=peak_bytes,
        limit_bytes=getattr(step.limit, "limit_bytes", None),
        reserved_bytes=None if peaks is None else peaks.reserved_bytes,
        allocation_retries=None if peaks is None else hardware.accelerators.allocation_retries(device_of(step)),
        host_bytes=psutil.Process().memory_info().rss,
        host_free_bytes=free_bytes(),
        pinned_bytes=None if pinned is None else int(pinned.get("allocated_bytes.current", 0)),
    )


def device_of(step: Step) -> torch.device:
    """Return the device of a step's parameters."""
    return next((p.device for p in step.workload.model.parameters()), torch.device("cpu"))


def held_tensors(step: Step, batch: Any) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that a step holds when it begins on a batch, by category."""
    model, optimizer = step.workload.model, step.workload.optimizer
    parameters = [*model.parameters(), *parameters_of(optimizer)]
    return {
        "parameters": [*parameters],
        "buffers": list(model.buffers()),
        "optimizer state": state_of(optimizer),
        "inputs": [*tensors_of(step.workload.batch), *tensors_of(batch)],
        "gradients": [p.grad for p in parameters if p.grad is not None],
    }

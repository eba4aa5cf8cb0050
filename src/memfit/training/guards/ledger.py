"""The bytes of a step by category, predicted and measured, and the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from memfit import hardware
from memfit.foundations import format_bytes
from memfit.hardware import free_bytes
from memfit.ir import BETWEEN_STEPS
from memfit.training.guards.limits import CpuLimit, held_by_category
from memfit.training.optimizers import parameters_of, state_of
from memfit.workload import tensors_of

if TYPE_CHECKING:
    from memfit.training.step import Step

IN_THE_STEP = "in the step"
"""Category of bytes alive only while a step runs: gradients, activations, temporaries, workspaces."""


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
        rows = [("", "predicted", "measured")]
        for name in [*self.measured_bytes, *(n for n in self.predicted_bytes if n not in self.measured_bytes)]:
            rows.append((name, _text(self.predicted_bytes.get(name)), _text(self.measured_bytes.get(name))))
        rows.append(("peak", _text(self.predicted_peak_bytes), _text(self.peak_bytes)))
        singles = {
            "limit": self.limit_bytes,
            "reserved": self.reserved_bytes,
            "this process on the host": self.host_bytes,
            "free on the host": self.host_free_bytes,
            "pinned": self.pinned_bytes,
        }
        rows += [(name, "", _text(value)) for name, value in singles.items() if value is not None]
        lines = [f"{name:26}{predicted:>14}{measured:>14}" for name, predicted, measured in rows]
        return "\n".join([f"Memory after step {self.steps}", *lines, *(f"Warning: {w}" for w in self.warnings)])


def _text(count: int | None) -> str:
    return "" if count is None else format_bytes(count)


def ledger_of(step: Step) -> Ledger:
    """Return the bytes of a step by category, predicted and measured."""
    device = device_of(step)
    held = held_by_category(held_tensors(step, step.workload.batch))
    held.pop("gradients", None)
    peak_bytes, reserved_bytes, retries = _measured(step, device)
    if peak_bytes is not None:
        held[IN_THE_STEP] = peak_bytes - sum(held.values())
    pinned = None
    if torch.cuda.is_initialized():
        pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return Ledger(
        steps=step.steps,
        predicted_bytes=_grouped({} if step.options.prediction is None else step.options.prediction.by_category),
        measured_bytes=held,
        predicted_peak_bytes=step.options.predicted_peak_bytes,
        peak_bytes=peak_bytes,
        limit_bytes=getattr(step.limit, "limit_bytes", None),
        reserved_bytes=reserved_bytes,
        allocation_retries=retries,
        host_bytes=psutil.Process().memory_info().rss,
        host_free_bytes=free_bytes(),
        pinned_bytes=pinned,
    )


def device_of(step: Step) -> torch.device:
    """Return the device of a step's parameters."""
    return next((p.device for p in step.workload.model.parameters()), torch.device("cpu"))


def allocation_retries(step: Step) -> int | None:
    """Return how often the allocator of a step's accelerator released its cache and retried; None on the CPU."""
    return hardware.accelerators.allocation_retries(device_of(step))


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


def _grouped(by_category: Mapping[str, int]) -> dict[str, int]:
    if not by_category:
        return {}
    between_steps: dict[str, int] = {name: by_category.get(name, 0) for name in BETWEEN_STEPS}
    return {**between_steps, IN_THE_STEP: sum(by_category.values()) - sum(between_steps.values())}


def _measured(step: Step, device: torch.device) -> tuple[int | None, int | None, int | None]:
    """Return peak allocated, peak reserved, and allocation retries; None for unknown ones."""
    if (peaks := hardware.accelerators.peaks(device)) is not None:
        return *peaks, allocation_retries(step)
    return (step.limit.peak_bytes or None if isinstance(step.limit, CpuLimit) else None), None, None

"""Where the bytes are: what a step holds by category, predicted and measured, and what the host has."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from memfit.devices.host import free_bytes
from memfit.errors import UsageError
from memfit.train.limits import CpuLimit, held_by_category
from memfit.train.step import Step
from memfit.units import format_bytes
from memfit.workload import tensors_of

IN_THE_STEP = "in the step"
"""Category of what only lives while a step runs: gradients, activations, temporaries, workspaces."""
_BETWEEN_STEPS = ("parameters", "buffers", "optimizer state", "inputs")
_live: list[weakref.ref[Step]] = []


@dataclass(frozen=True)
class Ledger:
    """The bytes of a step by category; `print` shows a table.

    Attributes:
        steps: Optimizer updates done.
        predicted_bytes: What the plan predicts at the peak, by category; empty where it does not say.
        measured_bytes: What is there now, by category, and "in the step" what the last step held beyond that at its
            peak, where that was measured: on a GPU since its peak was last reset, on the CPU under a limit.
        predicted_peak_bytes: Predicted peak; None without a plan.
        peak_bytes: Measured peak; None where it was not measured.
        limit_bytes: The step's limit; None without.
        reserved_bytes: The most that PyTorch's allocator took from the GPU; None on the CPU.
        allocation_retries: How often the GPU's allocator found no room, and gave back all it cached to look again:
            each one stops the GPU, and memory is about to run out. None on the CPU.
        host_bytes: What this process takes of the host's memory (resident set).
        host_free_bytes: What the host has left for it; a control group's limit counts.
        pinned_bytes: Page-locked host memory of PyTorch's allocator; None where that is not known.
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
        """What is about to go wrong."""
        found = []
        if self.allocation_retries:
            found.append(
                f"the allocator found no room {self.allocation_retries} times and emptied its cache, which stops the"
                " GPU: make a plan with a lower budget="
            )
        if self.limit_bytes and self.peak_bytes and self.peak_bytes > 0.98 * self.limit_bytes:
            found.append(f"the step is within 2 % of limit_bytes={self.limit_bytes}")
        if self.host_free_bytes < 0.05 * (self.host_free_bytes + self.host_bytes):
            found.append(f"the host has {format_bytes(self.host_free_bytes)} left for this process")
        return found

    def __str__(self) -> str:
        rows = [("", "predicted", "measured")]
        for name in [*self.measured_bytes, *(n for n in self.predicted_bytes if n not in self.measured_bytes)]:
            rows.append((name, _text(self.predicted_bytes.get(name)), _text(self.measured_bytes.get(name))))
        rows.append(("peak", _text(self.predicted_peak_bytes), _text(self.peak_bytes)))
        singles = {
            "limit": self.limit_bytes,
            "reserved": self.reserved_bytes,
            "this process on the host": self.host_bytes,
            "left of the host": self.host_free_bytes,
            "pinned": self.pinned_bytes,
        }
        rows += [(name, "", _text(value)) for name, value in singles.items() if value is not None]
        lines = [f"{name:26}{one:>14}{other:>14}" for name, one, other in rows]
        return "\n".join([f"Memory after step {self.steps}", *lines, *(f"Warning: {w}" for w in self.warnings)])


def _text(count: int | None) -> str:
    return "" if count is None else format_bytes(count)


@contextlib.contextmanager
def live(step: Step) -> Iterator[None]:
    """Have `memory_summary` find a step until the context is left, or nobody else holds the step."""
    reference = weakref.ref(step)
    _live.append(reference)
    try:
        yield
    finally:
        _live.remove(reference)


def memory_summary(step: Step | None = None) -> Ledger:
    """Return what a step holds, by category, predicted against measured; `print` shows a table.

    Args:
        step: The step, after it has run; None for the one that `apply`, `adapt` or `train` made last, of those that
            are not closed.

    Raises:
        UsageError: There is none.
    """
    step = _last_live() if step is None else step
    device = device_of(step)
    held = held_by_category(held_tensors(step, step.workload.batch))
    held.pop("gradients", None)
    peak_bytes, reserved_bytes, retries = _measured(step, device)
    if peak_bytes is not None:
        held[IN_THE_STEP] = peak_bytes - sum(held.values())
    return Ledger(
        steps=step.steps,
        predicted_bytes=_grouped({} if step.prediction is None else step.prediction.by_category),
        measured_bytes=held,
        predicted_peak_bytes=step.predicted_peak_bytes,
        peak_bytes=peak_bytes,
        limit_bytes=getattr(step.limit, "limit_bytes", None),
        reserved_bytes=reserved_bytes,
        allocation_retries=retries,
        host_bytes=psutil.Process().memory_info().rss,
        host_free_bytes=free_bytes(),
        pinned_bytes=_pinned_bytes(),
    )


def _last_live() -> Step:
    for reference in reversed(_live):
        if (step := reference()) is not None:
            return step
    raise UsageError(
        "memory_summary() finds no step: memfit.apply, adapt or train made none that is not closed by now. Call it"
        " before step.close(), or give step="
    )


def device_of(step: Step) -> torch.device:
    """Return the device of a step's parameters."""
    return next((p.device for p in step.workload.model.parameters()), torch.device("cpu"))


def allocation_retries(step: Step) -> int | None:
    """Return how often the allocator of a step's GPU found no room and emptied its cache; None on the CPU."""
    device = device_of(step)
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else None


def held_tensors(step: Step, batch: Any) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that a step holds when it is given a batch, by category."""
    model, optimizer = step.workload.model, step.workload.optimizer
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    return {
        "parameters": [*parameters],
        "buffers": list(model.buffers()),
        "optimizer state": [t for values in optimizer.state.values() for t in tensors_of(values)],
        "inputs": [*tensors_of(step.workload.batch), *tensors_of(batch)],
        "gradients": [p.grad for p in parameters if p.grad is not None],
    }


def _grouped(by_category: Mapping[str, int]) -> dict[str, int]:
    if not by_category:
        return {}
    found = {name: by_category.get(name, 0) for name in _BETWEEN_STEPS}
    return {**found, IN_THE_STEP: sum(by_category.values()) - sum(found.values())}


def _measured(step: Step, device: torch.device) -> tuple[int | None, int | None, int | None]:
    """Return peak allocated, peak reserved, and allocation retries, as far as they are known."""
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return *peaks, allocation_retries(step)
    return (step.limit.peak_bytes or None if isinstance(step.limit, CpuLimit) else None), None, None


def _pinned_bytes() -> int | None:
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None or not torch.cuda.is_initialized():
        return None
    return int(statistics().get("allocated_bytes.current", 0))

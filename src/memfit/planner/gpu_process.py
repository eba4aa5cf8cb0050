"""Estimates and plans in a process of their own: with fake CUDA tensors for a GPU, and outside of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memfit.capture.transport import packed
from memfit.fake_gpu import process, shim
from memfit.ir.device import Device
from memfit.planner.readings import readings_to_send, receive
from memfit.units import Progress
from memfit.workload import Workload

T = TypeVar("T")


def is_elsewhere(device: Device) -> bool:
    """Tell whether another process must predict for a device, since fake CUDA tensors work there and not here."""
    return device.kind == "cuda" and not shim.is_loaded() and shim.why_not() is None


def call(
    function: Callable[..., T],
    workload: Workload,
    options: dict[str, Any],
    progress: Progress,
    *,
    sizes: Sequence[int],
    fakes_cuda: bool = True,
) -> T:
    """Return the result of `function(workload, **options, progress=...)`, run in a process of its own.

    That process has the shapes of the workload's tensors and no data, and is in no process group. What the step reads
    from its data is sent with it.

    Args:
        function: A function of a module of memfit, which the process finds by its name.
        workload: The user's workload; its data and its scheduler stay here.
        sizes: The microbatch sizes that the step may be captured with there.
        fakes_cuda: Whether CUDA tensors are fake there.

    Raises:
        WorkloadError: The workload can't be sent.
        MemfitError: The function raised it.
        CaptureError: The process ended without a reply.
    """
    return call_each(function, workload, [options], progress, sizes=sizes, fakes_cuda=fakes_cuda)[0]


def call_each(
    function: Callable[..., T],
    workload: Workload,
    calls: Sequence[dict[str, Any]],
    progress: Progress,
    *,
    sizes: Sequence[int],
    fakes_cuda: bool = True,
) -> list[T]:
    """Return the results of `function(workload, **options, progress=...)` for some options, all of them at once.

    Each has a process of its own, as `call` has. Their progress is told as that of one.

    Raises:
        MemfitError, CaptureError: As `call` raises them, once all have ended.
    """
    setters = [(receive, readings_to_send(workload, sizes))]
    packets = [packed(function, workload, options, setters) for options in calls]
    return process.run_each(packets, progress, fakes_cuda=fakes_cuda)

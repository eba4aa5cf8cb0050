"""Estimates and plans in a process of their own: with fake CUDA tensors for a GPU, and outside of a process group."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from memfit.capture.transport import packed
from memfit.fake_gpu import process, shim
from memfit.interrupts import safe_point
from memfit.ir.device import Device
from memfit.planner.readings import readings_to_send, receive
from memfit.progress import Progress
from memfit.workload import Workload

T = TypeVar("T")
_POLL_SECONDS = 0.1  # from one look for signals to the next


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
    (packet,) = _packed(function, workload, [options], sizes)
    result: T = process.run(packet, progress, fakes_cuda=fakes_cuda)
    return result


def call_each(
    function: Callable[..., T],
    workload: Workload,
    calls: Sequence[dict[str, Any]],
    progress: Progress,
    *,
    sizes: Sequence[int],
) -> list[T]:
    """Return the results of `function(workload, **options, progress=...)` for some options, all of them at once.

    Each has a process of its own, as `call` has. Their progress is told as that of one: what they did and have to do of
    a stage is added up.

    Raises:
        MemfitError, CaptureError: As `call` raises them, once all have ended.
    """
    packets = _packed(function, workload, calls, sizes)
    together, over = _Together(progress), threading.Event()
    with ThreadPoolExecutor(len(packets)) as pool:
        waiting = [
            pool.submit(process.run, packet, together.of(index), over=over) for index, packet in enumerate(packets)
        ]
        try:
            while futures.wait(waiting, _POLL_SECONDS).not_done:
                safe_point()
        except BaseException:
            over.set()
            raise
    return [each.result() for each in waiting]


def _packed(
    function: Callable[..., T], workload: Workload, calls: Sequence[dict[str, Any]], sizes: Sequence[int]
) -> list[bytes]:
    """Return the packets of some calls, with what the step reads from its data."""
    readings = readings_to_send(workload, sizes)
    return [packed(function, workload, options, [(receive, readings)]) for options in calls]


class _Together:
    """The progress of several calls, told as that of one."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._stages: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def of(self, index: int) -> Progress:
        """Return the progress function of one of the calls."""

        def tell(stage: str, done: int, total: int) -> None:
            with self._lock:
                calls = self._stages[stage]
                calls[index] = done, total
                self._progress(stage, sum(done for done, _ in calls.values()), sum(of for _, of in calls.values()))

        return tell

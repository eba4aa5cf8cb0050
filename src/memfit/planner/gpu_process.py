"""Estimates and plans in a process of their own: with fake CUDA tensors for a GPU, and outside of a process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memfit import hardware
from memfit.capture import DataRun, Policy, Readings, packed, read_with_data, reads_unknown, why_no_data_run
from memfit.errors import CaptureError
from memfit.foundations import Progress
from memfit.ir import Device, Levers
from memfit.levers import applied
from memfit.workload import Workload, samples_of

_received: dict[int, Readings] = {}


class DataRuns:
    """Runs of a workload's step with data, which record the values that its code reads."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.readings: dict[Levers, Readings | None] = {}
        self.policy: Policy | None = None

    def of(self, levers: Levers, *, explores: bool = True) -> DataRun:
        """Return the run of the step with the precision and the microbatch size of some levers; each runs once.

        Where it explores, other control-flow paths of the step are tried too.
        """
        return _DataRun(self, Levers(precision=levers.precision, microbatch_size=levers.microbatch_size), explores)


class _DataRun:
    def __init__(self, data: DataRuns, plain: Levers, explores: bool) -> None:
        self.data, self.plain, self.explores = data, plain, explores

    @property
    def policy(self) -> Policy | None:
        return self.data.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self.data.policy = policy

    @property
    def known(self) -> Readings | None:
        return self.data.readings.get(self.plain) or _received.get(self.plain.microbatch_size)

    def __call__(self) -> Readings | None:
        if self.known is None and self.plain not in self.data.readings:
            build = functools.partial(applied, self.plain)
            self.data.readings[self.plain] = read_with_data(self.data.workload, build, self.plain.microbatch_size)
        return self.known


def readings_to_send(workload: Workload, sizes: Sequence[int]) -> dict[int, Readings]:
    """Return the step's readings with data, by microbatch size; none where it reads known values, or can't run here."""
    whole = Levers(microbatch_size=samples_of(workload))
    if why_no_data_run(workload) is not None or not reads_unknown(workload, functools.partial(applied, whole)):
        return {}
    runs = DataRuns(workload)
    try:
        by_size = {size: runs.of(Levers(microbatch_size=size))() for size in sorted(set(sizes))}
    except CaptureError:  # a step that runs on a GPU only
        return {}
    return {size: readings for size, readings in by_size.items() if readings is not None}


def receive(readings: dict[int, Readings]) -> None:
    _received.update(readings)


T = TypeVar("T")


def is_elsewhere(device: Device) -> bool:
    """Tell whether another process must predict for a device, since fake CUDA tensors work there and not here."""
    return device.kind == "cuda" and not hardware.shim.is_loaded() and hardware.shim.why_not() is None


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
    from its data is sent with it, for the microbatch sizes that it may be captured with there. What the function
    raises is raised here; `CaptureError` where the process ends without a reply.
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

    Each has a process of its own, as `call` has. Their progress is told as that of one, and errors are raised once all
    have ended.
    """
    setters = [(receive, readings_to_send(workload, sizes))]
    packets = [packed(function, workload, options, setters) for options in calls]
    return hardware.process.run_each(packets, progress, fakes_cuda=fakes_cuda)

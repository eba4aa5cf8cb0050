"""Captures of a workload's step with levers applied, under fake tensors: here, or in a process of its own.

There tensors of a GPU are fake too, or this process is one of a group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from memfit import hardware
from memfit.capture import (
    CaptureJob,
    DataRun,
    Policy,
    Readings,
    capture,
    capture_with_data,
    packed,
    read_with_data,
    reads_unknown,
    warmed,
    why_no_data_run,
)
from memfit.errors import CaptureError
from memfit.foundations import Progress, silent
from memfit.ir import Device, Levers, Trace, makers_of_kept
from memfit.levers import LeversOn, applied, compiles, described_loop, used_levers
from memfit.ranks import shard
from memfit.workload import LoopWorkload, StepProgram, Workload, has_data, samples_of

BENCHMARK_ERROR = 0.15
"""By what share a peak may be above its prediction with `Loop.cudnn_benchmark`: a bound that was not measured."""


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


@dataclass(eq=False)
class _DataRun:
    data: DataRuns
    plain: Levers
    explores: bool
    policy = property(lambda self: self.data.policy, lambda self, policy: setattr(self.data, "policy", policy))

    @property
    def known(self) -> Readings | None:
        return self.data.readings.get(self.plain) or _received.get(self.plain.microbatch_size)

    def __call__(self) -> Readings | None:
        if self.known is None and self.plain not in self.data.readings:
            build = functools.partial(applied, self.plain)
            self.data.readings[self.plain] = read_with_data(self.data.workload, build, self.plain.microbatch_size)
        return self.known


def receive(readings: dict[int, Readings]) -> None:
    _received.update(readings)


T = TypeVar("T")


def is_elsewhere(device: Device) -> bool:
    """Tell whether another process must predict for a device, since fake CUDA tensors work there and not here."""
    return device.kind == "cuda" and not hardware.shim.is_loaded() and hardware.shim.why_not() is None


def call_elsewhere(
    function: Callable[..., T],
    workload: Workload,
    calls: Sequence[dict[str, Any]],
    progress: Progress,
    *,
    sizes: Sequence[int],
    fakes_cuda: bool = True,
) -> list[T]:
    """Return the results of `function(workload, **options, progress=...)` for some options, all of them at once.

    Each runs in a process of its own, which has the shapes of the workload's tensors and no data, and is in no process
    group. What the step reads from its data is sent with it, for the microbatch sizes that it may be captured with
    there. Their progress is told as that of one. What a function raises is raised here once all have ended;
    `CaptureError` where a process ends without a reply.
    """
    readings, whole = dict[int, Readings](), Levers(microbatch_size=samples_of(workload))
    if why_no_data_run(workload) is None and reads_unknown(workload, functools.partial(applied, whole)):
        runs = DataRuns(workload)
        with contextlib.suppress(CaptureError):  # of a step that runs on a GPU only
            by_size = {size: runs.of(Levers(microbatch_size=size))() for size in sorted(set(sizes))}
            readings = {size: found for size, found in by_size.items() if found is not None}
    setters = [(receive, readings)]
    packets = [packed(function, workload, options, setters) for options in calls]
    return hardware.process.run_each(packets, progress, fakes_cuda=fakes_cuda)


@dataclass(frozen=True)
class StepVariant:
    """A workload's step with levers applied, to be captured for a device."""

    workload: Workload
    levers: Levers
    device: Device
    data: DataRuns
    build: Callable[..., AbstractContextManager[StepProgram]] = applied  # from the levers and a copy of the workload
    copied: Callable[[], Workload] | None = None  # the copy that is captured in place of the workload; None for itself
    warm: bool = False  # whether what is captured has made a step, and its second one is like it (`CaptureJob`)
    explores: bool = True  # whether other control-flow paths of the step are tried too


Store = Callable[[StepVariant, Callable[[StepVariant], Trace]], Trace]
"""Returns the trace of a step, which it may have, or have captured by a function."""
_stores: list[Store] = []


@contextlib.contextmanager
def captured_through(store: Store) -> Iterator[None]:
    """Ask a store for each step that is to be captured within the context, such as one that keeps traces."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.remove(store)


def capture_levers(workload: Workload, levers: Levers, device: Device, data: DataRuns | None = None) -> Trace:
    """Return the trace of a workload's step with levers applied, under fake tensors, as captured for a device.

    `data` has what the step reads with data; without it the step runs with data where that is asked.
    """
    return capture_each(workload, [levers], device, data)[0]


def capture_each(
    workload: Workload,
    levers: Sequence[Levers],
    device: Device,
    data: DataRuns | None = None,
    progress: Progress = silent,
) -> list[Trace]:
    """Return the traces of a workload's step with some levers each, as `capture_levers` does.

    For a GPU they are captured in a process with fake CUDA, where this one has none.
    """
    if is_elsewhere(device):
        options = {"levers": list(levers), "device": device}
        sizes = [each.microbatch_size for each in levers]
        return call_elsewhere(capture_each, workload, [options], silent, sizes=sizes)[0]
    data = data or DataRuns(workload)
    return [_captured(StepVariant(workload, each, device, data)) for each in levers]


def capture_plain(workload: Workload, levers: Levers, device: Device) -> Trace:
    """Return the trace of the step that is estimated: of the user's own loop, where the workload describes one."""
    build = applied if workload.loop is None else described_loop
    return _captured(StepVariant(workload, levers, device, DataRuns(workload), build))


class Captures:
    """Captures a workload's step under many levers, in less time than one by one.

    All are of one copy that has made a step before, but where levers change what the optimizer holds, and but for those
    of a loop, which also holds gradients and variables of the step before. Of a step that may take several control-flow
    paths, each follows the one that `capture_levers` found with the same data.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        self.workload, self.device = workload, device
        self.data = DataRuns(workload)
        self._copy: Workload | None = None  # that has made a step
        self._starts_anew = isinstance(workload, LoopWorkload) and bool(workload.tape.entries)

    def __call__(self, levers: Levers) -> Trace:
        """Return the trace of the step with levers applied, as `capture_levers` does."""
        if is_elsewhere(self.device):
            return capture_levers(self.workload, levers, self.device, self.data)
        variant = StepVariant(self.workload, levers, self.device, self.data, explores=False)
        size = samples_of(self.workload)
        as_before = not any(lever.changes_state(levers) for lever in used_levers(LeversOn(levers, size)))
        is_as_later = not compiles(levers)  # of compiled steps, the first is like no other
        if as_before and is_as_later and not self._starts_anew:
            try:
                return _captured(dataclasses.replace(variant, copied=self._warmed, warm=True))
            except CaptureError:  # as for a model that holds something of the step before, in another precision
                pass
        return _captured(variant)

    def of_one_step(self, levers: Levers) -> Trace:
        """Return the trace of the step as the workload is: of what it computes, which may hold more later."""
        if is_elsewhere(self.device):
            return capture_levers(self.workload, levers, self.device, self.data)
        return _captured(StepVariant(self.workload, levers, self.device, self.data, warm=True, explores=False))

    def _warmed(self) -> Workload:
        """Return the copy that has made a step; it fails once and for all where the step reads what only data tells."""
        if self._copy is None:
            self._starts_anew = True
            plain = Levers(microbatch_size=samples_of(self.workload))
            device = _fake_device(self.device)
            self._copy = warmed(self.workload, functools.partial(applied, plain), device=device)
            self._starts_anew = False
        return self._copy


def _captured(variant: StepVariant, stores: Sequence[Store] | None = None) -> Trace:
    stores = _stores if stores is None else stores
    return stores[-1](variant, functools.partial(_captured, stores=stores[:-1])) if stores else _capture(variant)


def _capture(variant: StepVariant) -> Trace:
    if variant.copied is not None:
        variant = dataclasses.replace(variant, workload=variant.copied(), copied=None)
    sharding, device = variant.levers.sharding, variant.device
    if sharding is None:
        return _captured_here(variant)
    from memfit.ranks import fake_mesh, of_one_rank  # distributed packages take a second to import

    part = dataclasses.replace(
        variant, workload=of_one_rank(variant.workload, sharding.world_size), warm=False, explores=True
    )
    if sharding.mode == "ddp" and (device.kind == "cuda" or not has_data(variant.workload)):
        # Its C++ reads memory that fake tensors don't have: replayed on paper, which is the same to the byte.
        alone = dataclasses.replace(part, levers=replace(variant.levers, sharding=None))
        return shard(_captured_here(alone), sharding)
    with fake_mesh(sharding, device.kind) as mesh:
        one_rank = functools.partial(variant.build, mesh=mesh, is_part=True)
        return replace(_captured_here(dataclasses.replace(part, build=one_rank)), sharding=sharding)


def _captured_here(variant: StepVariant) -> Trace:
    workload, levers, device = variant.workload, variant.levers, variant.device
    job = CaptureJob(
        workload,
        functools.partial(variant.build, levers),
        levers.precision,
        levers.microbatch_size,
        _fake_device(device),
        variant.warm,
        variant.data.of(levers, explores=variant.explores),
    )
    try:
        trace = capture(job)
    except CaptureError as e:
        as_code = compiles(levers)  # its kernels are recorded in place of code
        if as_code or device.kind != "cpu" or why_no_data_run(workload) is not None:
            raise
        trace = capture_with_data(job, instead_of=e)
    trace, notes = replace(trace, selective=makers_of_kept(trace, levers.regions)), list(trace.notes)
    if workload.loop is not None and variant.build is not described_loop:
        notes.append("memfit captured its own step; Workload.loop does not change its order")
    elif workload.loop is not None:
        notes.append("memfit captured your own loop, as Workload.loop describes it")
        if workload.loop.cudnn_benchmark and device.kind == "cuda":
            notes.append(
                "with Loop.cudnn_benchmark cuDNN chooses the fastest kernels, even if they need more memory: the"
                f" error bar is {BENCHMARK_ERROR:.0%} wider"
            )
    if job.device is not None:
        return replace(trace, notes=notes)
    notes.append(
        f"memfit captured the step for a CPU: fake CUDA tensors are not available ({hardware.shim.why_not()})."
        " Attention, normalisation and the optimizer use other kernels on a GPU, so the error bar is wide"
    )
    return replace(trace, device=device.name, notes=notes)


def _fake_device(device: Device) -> Device | None:
    """Return the device whose fake tensors a step is captured under; None for the CPU's, where a GPU's can't be had."""
    return device if device.kind != "cuda" or hardware.shim.is_loaded() else None

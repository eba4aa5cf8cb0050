"""Captures of a workload's step with levers applied, under fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from msgspec.structs import replace

from memfit import hardware
from memfit.capture import CaptureJob, capture, capture_with_data, warmed, why_no_data_run
from memfit.errors import CaptureError
from memfit.foundations import Progress
from memfit.ir import Device, Levers, Trace
from memfit.levers import LeversOn, applied, compiles, described_loop, used_levers
from memfit.planner import gpu_process
from memfit.planner.gpu_process import DataRuns
from memfit.ranks import shard
from memfit.workload import LoopWorkload, StepProgram, Workload, has_data, samples_of

BENCHMARK_ERROR = 0.15
"""By what share a peak may be above its prediction with `Loop.cudnn_benchmark`: a bound that was not measured."""


@dataclass(frozen=True)
class StepVariant:
    """A workload's step with levers applied, to be captured for a device."""

    workload: Workload
    levers: Levers
    device: Device
    data: DataRuns
    build: Callable[..., AbstractContextManager[StepProgram]] = applied  # from the levers and a copy of the workload
    warm: bool = False  # whether the workload has made a step, and its second one is like it (`CaptureJob`)
    explores: bool = True  # whether other control-flow paths of the step are tried too


def capture_levers(workload: Workload, levers: Levers, device: Device, data: DataRuns | None = None) -> Trace:
    """Return the trace of a workload's step with levers applied, under fake tensors, as captured for a device.

    `data` has what the step reads with data; without it the step runs with data where that is asked.
    """
    return capture_each(workload, [levers], device, data)[0]


def capture_each(
    workload: Workload, levers: Sequence[Levers], device: Device, data: DataRuns | None = None
) -> list[Trace]:
    """Return the traces of a workload's step with some levers each, as `capture_levers` does.

    For a GPU they are captured in a process with fake CUDA, where this one has none.
    """
    if gpu_process.is_elsewhere(device):
        options = {"levers": list(levers), "device": device}
        sizes = [each.microbatch_size for each in levers]
        return gpu_process.call(_captured_there, workload, options, lambda *_: None, sizes=sizes)
    data = data or DataRuns(workload)
    return [_captured(StepVariant(workload, each, device, data)) for each in levers]


def _captured_there(workload: Workload, *, levers: list[Levers], device: Device, progress: Progress) -> list[Trace]:
    return capture_each(workload, levers, device)


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
        if isinstance(workload, LoopWorkload) and workload.tape.entries:
            self._warm = None

    def __call__(self, levers: Levers) -> Trace:
        """Return the trace of the step with levers applied, as `capture_levers` does."""
        if gpu_process.is_elsewhere(self.device):
            return capture_levers(self.workload, levers, self.device, self.data)
        variant = StepVariant(self.workload, levers, self.device, self.data, explores=False)
        size = samples_of(self.workload)
        as_before = not any(lever.changes_state(levers) for lever in used_levers(LeversOn(levers, size)))
        is_as_later = not compiles(levers)  # of compiled steps, the first is like no other
        if as_before and is_as_later and self._warm is not None:
            try:
                return _captured(dataclasses.replace(variant, workload=self._warm, warm=True))
            except CaptureError:  # as for a model that holds something of the step before, in another precision
                pass
        return _captured(variant)

    def of_one_step(self, levers: Levers) -> Trace:
        """Return the trace of the step as the workload is: of what it computes, which may hold more later."""
        if gpu_process.is_elsewhere(self.device):
            return capture_levers(self.workload, levers, self.device, self.data)
        return _captured(StepVariant(self.workload, levers, self.device, self.data, warm=True, explores=False))

    @functools.cached_property
    def _warm(self) -> Workload | None:
        """A copy that has made a step; None where that fails, as of a step that reads what only data can tell."""
        plain = Levers(microbatch_size=samples_of(self.workload))
        try:
            return warmed(self.workload, functools.partial(applied, plain), device=_fake_device(self.device))
        except CaptureError:
            return None


def _captured(variant: StepVariant) -> Trace:
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
    selective = sorted({fqn for region in levers.regions if region.keep for fqn in region.modules})
    trace = replace(trace, selective=selective)
    if workload.loop is not None and variant.build is not described_loop:
        found = ["memfit captured its own step; Workload.loop does not change its order"]
        trace = replace(trace, notes=[*trace.notes, *found])
    elif workload.loop is not None:
        found = ["memfit captured your own loop, as Workload.loop describes it"]
        if workload.loop.cudnn_benchmark and device.kind == "cuda":
            found.append(
                "with Loop.cudnn_benchmark cuDNN chooses the fastest kernels, even if they need more memory: the"
                f" error bar is {BENCHMARK_ERROR:.0%} wider"
            )
        trace = replace(trace, notes=[*trace.notes, *found])
    if job.device is not None:
        return trace
    note = (
        f"memfit captured the step for a CPU: fake CUDA tensors are not available ({hardware.shim.why_not()})."
        " Attention, normalisation and the optimizer use other kernels on a GPU, so the error bar is wide"
    )
    return replace(trace, device=device.name, notes=[*trace.notes, note])


def _fake_device(device: Device) -> Device | None:
    """Return the device whose fake tensors a step is captured under; None for the CPU's, where a GPU's can't be had."""
    return device if device.kind != "cuda" or hardware.shim.is_loaded() else None

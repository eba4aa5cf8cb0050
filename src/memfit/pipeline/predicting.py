"""Predictions: capture, cost, simulate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from memfit.capture.step import capture, warmed
from memfit.capture.with_data import capture_with_data, why_not_here
from memfit.cost.calibrate import calibrate
from memfit.cost.roofline import roofline
from memfit.devices import fake_cuda
from memfit.devices.advice import precisions, supports_bfloat16
from memfit.devices.host import find_device
from memfit.errors import CaptureError, UsageError
from memfit.ir import codec, combinations
from memfit.ir.allocations import allocations
from memfit.ir.cost import CostTable
from memfit.ir.device import Device
from memfit.ir.flops import Matmul
from memfit.ir.plan import Levers, Precision, Prediction
from memfit.ir.replay import replay
from memfit.ir.sharding import Mode, Sharding, communication, shard, with_share_of_update
from memfit.ir.simulate import repeats, simulate
from memfit.ir.throughput import throughput
from memfit.ir.timeline import Timeline
from memfit.ir.trace import Trace
from memfit.pipeline import remote
from memfit.pipeline.applying import applied, check_workload, described
from memfit.pipeline.combining import circumstances
from memfit.pipeline.reading import WithData, readings_to_send
from memfit.pipeline.refusals import check_supported
from memfit.report.cells import stages, with_bars
from memfit.report.chrome_trace import write_chrome_trace
from memfit.report.snapshot import write_snapshot
from memfit.units import format_bytes, format_seconds
from memfit.workload import Loop, StepProgram, Workload, precision_label, samples_of, tokens_per_sample

PRECISIONS: tuple[Precision, ...] = ("32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true")
_BENCHMARK_ERROR = 0.15  # of the peak, a bound that was not measured: kernels that are tried may need much
_FALLBACK_ERROR = 0.25  # of a GPU's peak predicted from the CPU's program: 8 % was seen on a small GPT

_Build = Callable[[Levers, Workload], AbstractContextManager[StepProgram]]
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and of how much."""


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@with_bars(stages)
def estimate(
    workload: Workload,
    *,
    device: str = "cpu",
    precision: Precision | Literal["auto"] = "32-true",
    microbatch_size: int | None = None,
    world_size: int = 1,
    sharding: Mode = "ddp",
    snapshot: Path | str | None = None,
    chrome_trace: Path | str | None = None,
    progress: Progress = silent,
) -> Prediction:
    """Predict the peak and the time of a step as it is, without running it.

    For a GPU, which need not be here, the step is captured in a process of its own: the workload is
    sent as its program and its tensors' shapes. A model built under `torch.device("meta")` takes no memory.

    Args:
        workload: The user's workload; nothing of it is changed.
        device: The device's name: "cpu", "cuda", or one of the catalogue (`memfit devices` shows it).
        precision: Of the step; "auto" takes the mixed one that the device is made for.
        microbatch_size: Samples in one forward and backward pass; None for the whole batch.
        world_size: Ranks that train together (≥ 1); the batch is that of one of them, and so is the prediction.
        sharding: How they share it, where they are more than one: "ddp", "zero1", "zero2" or "zero3" (`ir.sharding`).
        snapshot: Where to write the allocator's simulated history, for pytorch.org/memory_viz; GPUs only.
        chrome_trace: Where to write the step's timeline, for Perfetto.
        progress: Told how far it is; by default bars in a notebook, and nobody elsewhere.

    Raises:
        UsageError: No such device, precision or sharding.
        OutputError: A file can't be written, which is found out first.
        CaptureError: The step can't be captured.
    """
    check_supported(workload)
    found = find_device(device)
    if precision == "auto":
        precision = precisions(found)[-1]
    check_precision(precision, "precision", found, workload)
    if world_size < 1:
        raise UsageError(f"world_size={world_size} is not above 0: give the number of ranks")
    if snapshot is not None and found.kind != "cuda":
        raise UsageError(f"snapshot= shows the allocator of a GPU, and device={device!r} has none: name a GPU")
    for path in (snapshot, chrome_trace):
        if path is not None:
            codec.check_writable(path)
    if is_elsewhere(found):
        options = {
            "device": device,
            "precision": precision,
            "microbatch_size": microbatch_size,
            "world_size": world_size,
            "sharding": sharding,
            "snapshot": snapshot and Path(snapshot).resolve(),
            "chrome_trace": chrome_trace and Path(chrome_trace).resolve(),
        }
        readings = readings_to_send(workload, [microbatch_size or samples_of(workload)])
        prediction: Prediction = remote.call(estimate, workload, options, progress, readings)
        return prediction
    check_workload(workload, found)
    progress("capture", 0, 1)
    size = microbatch_size or samples_of(workload)
    trace = capture_plain(workload, Levers(precision=precision, microbatch_size=size), found)
    progress("capture", 1, 1)
    costs = costs_of([trace], found, functools.partial(progress, "measure operators"))
    if workload.loop is not None and workload.loop.cudnn_benchmark and found.kind == "cuda":
        costs = replace(costs, peak_error=costs.peak_error + _BENCHMARK_ERROR)
    if world_size > 1:
        trace = _sharded(trace, Sharding(world_size=world_size, mode=sharding), found)
        costs = costs_of([trace], found) if found.kind == "cuda" else costs
    if (label := precision_label(workload, precision)) != precision:
        note = f"the model is not in fp32, so precision={precision!r} runs it as it was built: {label}"
        trace = replace(trace, notes=[*trace.notes, note])
    prediction, timeline = predict(trace, costs, found, tokens_per_sample(workload.batch))
    if snapshot is not None:
        write_snapshot(
            allocations(trace, costs),
            found.allocator,
            snapshot,
            capacity_bytes=found.usable_bytes,
            total_bytes=found.memory_bytes,
            seconds=timeline.seconds,
        )
    if chrome_trace is not None:
        write_chrome_trace(timeline, chrome_trace)
    return prediction


def _sharded(trace: Trace, sharding: Sharding, device: Device) -> Trace:
    """Return the step of one rank, with a note on what it sends."""
    note = f"{sharding.mode} over {sharding.world_size} ranks, on paper: the batch is one rank's"
    if device.link_bytes_per_second:
        sent = communication(trace, sharding, device.link_bytes_per_second)
        total = sent.all_gather_bytes + sent.reduce_scatter_bytes + sent.all_reduce_bytes
        note += (
            f". A rank sends {format_bytes(total)} a step, {format_seconds(sent.seconds)} over the device's host link"
            " alone; the step's time does not count it"
        )
    sharded = with_share_of_update(shard(trace, sharding), sharding)
    return replace(sharded, notes=[*sharded.notes, note])


def is_elsewhere(device: Device) -> bool:
    """Tell whether another process must predict for a device, since fake CUDA tensors work there and not here."""
    return device.kind == "cuda" and not fake_cuda.is_loaded() and fake_cuda.why_not() is None


def capture_levers(workload: Workload, levers: Levers, device: Device, data: WithData | None = None) -> Trace:
    """Return the trace of a workload's step with levers applied, under fake tensors.

    Args:
        workload: The user's workload.
        levers: The levers.
        device: Captured for.
        data: Has what the step reads with data; None to run it where that is asked.
    """
    return _captured(workload, levers, device, data or WithData(workload))


def capture_plain(workload: Workload, levers: Levers, device: Device) -> Trace:
    """Return the trace of the step that is estimated: of the user's own loop, where the workload describes one."""
    build = applied if workload.loop is None else described
    return _captured(workload, levers, device, WithData(workload), build=build)


class Captures:
    """Captures a workload's step under many levers, in less time than one by one.

    All are of one copy that has made a step before, but where levers change what the optimizer holds. Of a step that
    may take several courses, each follows the one that `capture_levers` found with the same data.

    Args:
        workload: The user's workload.
        device: Captured for.

    Attributes:
        data: Has what the step reads with data.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        self.workload, self.device = workload, device
        self.data = WithData(workload)

    def __call__(self, levers: Levers) -> Trace:
        """Return the trace of the step with levers applied, as `capture_levers` does."""
        as_before = levers.optimizer == "as-is" and levers.precision != "bf16-true"
        if as_before and self._warm is not None:
            try:
                return _captured(self._warm, levers, self.device, self.data, warm=True, explores=False)
            except CaptureError:  # as for a model that holds something of the step before, in another precision
                pass
        return _captured(self.workload, levers, self.device, self.data, explores=False)

    @functools.cached_property
    def _warm(self) -> Workload | None:
        """A copy that has made a step; None where that fails, as of a step that reads what only data can tell."""
        plain = Levers(microbatch_size=samples_of(self.workload))
        try:
            return warmed(self.workload, functools.partial(applied, plain), device=_fake_device(self.device))
        except CaptureError:
            return None


def _captured(
    workload: Workload,
    levers: Levers,
    device: Device,
    data: WithData,
    *,
    warm: bool = False,
    build: _Build = applied,
    explores: bool = True,
) -> Trace:
    program, named = functools.partial(build, levers), (levers.precision, levers.microbatch_size)
    try:
        reading = data.of(levers, explores=explores)
        trace = capture(workload, program, *named, device=_fake_device(device), warm=warm, reading=reading)
    except CaptureError as e:
        if device.kind != "cpu" or why_not_here(workload) is not None:
            raise
        trace = capture_with_data(workload, program, *named, instead_of=e)
    if workload.loop is not None:
        trace = replace(trace, notes=[*trace.notes, *_loop_notes(workload.loop, build is described, device)])
    if _fake_device(device) is not None:
        return trace
    note = (
        f"the step was captured as it runs on a CPU, since fake CUDA tensors can't be had: {fake_cuda.why_not()}."
        " Attention, normalisation and the optimizer take other kernels on a GPU, so the error bar is wide"
    )
    return replace(trace, device=device.name, notes=[*trace.notes, note])


def _loop_notes(loop: Loop, is_described: bool, device: Device) -> list[str]:
    """Return what a reader should know of whose order of things was captured."""
    if not is_described:
        return ["memfit's own step was captured: it runs in its own order, whatever Workload.loop says"]
    found = ["the user's loop was captured, as Workload.loop describes it"]
    if loop.cudnn_benchmark and device.kind == "cuda":
        found.append(
            "with Loop.cudnn_benchmark cuDNN takes the fastest kernels, whatever memory they need: the interval is"
            f" {_BENCHMARK_ERROR:.0%} wider"
        )
    return found


def _fake_device(device: Device) -> Device | None:
    """Return the device whose fake tensors a step is captured under; None for the CPU's, where a GPU's can't be had."""
    return device if device.kind != "cuda" or fake_cuda.is_loaded() else None


def costs_of(traces: Iterable[Trace], device: Device, progress: Callable[[int, int], None] | None = None) -> CostTable:
    """Return what the operators of some traces cost: measured on the CPU at hand, modelled for a GPU.

    Traces in TF32 have the operators of those in fp32, and cost less: they need a table of their own.
    """
    if device.kind == "cpu":
        return calibrate(traces, progress)
    traces = list(traces)
    costs = roofline(traces, device, matmul=_matmul(traces))
    return costs if fake_cuda.is_loaded() else replace(costs, peak_error=_FALLBACK_ERROR)


def _matmul(traces: list[Trace]) -> Matmul:
    return "high" if traces and all(trace.precision == "tf32" for trace in traces) else "highest"


def predict(
    trace: Trace, costs: CostTable, device: Device, tokens_per_sample: int | None = None
) -> tuple[Prediction, Timeline]:
    """Return the prediction for a captured step, and its timeline."""
    timeline = simulate(trace, costs)
    allocated, reserved, by_category = timeline.peak_bytes, None, timeline.at_peak()
    if device.kind == "cuda":
        report = replay(allocations(trace, costs), device.allocator, total_bytes=device.memory_bytes)
        allocated, reserved = report.peak_allocated_bytes, report.peak_reserved_bytes
        by_category["rounding"] = allocated - timeline.peak_bytes
    prediction = Prediction(
        peak_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_upper_bytes=int((reserved or allocated) * (1 + costs.peak_error) * (1 + trace.slack)),
        step_seconds=timeline.step_seconds,
        after_step_bytes=after_step_bytes(trace, costs),
        phase_seconds=_phase_seconds(trace, timeline),
        by_category=by_category,
        where=timeline.where(),
        device_bytes=device.usable_bytes,
        throughput=throughput(
            trace,
            costs,
            device,
            step_seconds=timeline.step_seconds,
            tokens_per_sample=tokens_per_sample,
            matmul=_matmul([trace]),
        ),
        notes=[*trace.notes, *_advice(trace, device)],
    )
    return prediction, timeline


def after_step_bytes(trace: Trace, costs: CostTable) -> int:
    """Return what is allocated once a step is over: weights, optimizer state, the batch, and what the loop holds."""
    left = sum(storage.nbytes for storage in trace.storages if storage.death >= len(trace.ops))
    return left + costs.resident_workspace_bytes


def _phase_seconds(trace: Trace, timeline: Timeline) -> dict[str, float]:
    """Return how long each phase of a step takes, those that it has."""
    found: dict[str, float] = dict.fromkeys(("forward", "backward", "recompute", "optimizer"), 0.0)
    for phase, seconds, times in zip(timeline.phases, timeline.seconds, repeats(trace).tolist(), strict=True):
        found[phase] += seconds * times
    return {phase: seconds for phase, seconds in found.items() if seconds}


def _advice(trace: Trace, device: Device) -> list[str]:
    notes = []
    if trace.precision in ("bf16-mixed", "bf16-true") and not supports_bfloat16(device):
        notes.append(f"{device.name} has no bfloat16 units: PyTorch emulates them, slowly; use precision='16-mixed'")
    if trace.precision != "bf16-true" and any(p.itemsize == 2 and p.group >= 0 for p in trace.parameters):
        notes.append(
            "Workload.model has weights of 16 bits, which lose every update below 1/256 of them: build it in fp32, or"
            " use precision='bf16-true' with Workload.bf16_updates"
        )
    return notes


def check_precision(precision: str, argument: str, device: Device, workload: Workload) -> None:
    """Check a precision that an argument holds.

    Raises:
        UsageError: There is none of that name, the device has no units for it, or the workload does not say what it
            needs.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"{argument}={precision!r} is unknown: use one of {', '.join(PRECISIONS)}")
    used = {precision} | circumstances(workload, device)
    combinations.check(used, where=f"{argument}={precision!r} on {device.name}: ")

"""Predictions for captured steps: cost and simulate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from msgspec.structs import replace

from memfit import hardware
from memfit.cost import calibrate, kernels_bytes, links_of, measured_costs, roofline, with_collectives
from memfit.errors import UsageError
from memfit.foundations import StageProgress
from memfit.hardware import find_device, supports
from memfit.ir import (
    CostTable,
    Device,
    Levers,
    Matmul,
    Plan,
    Precision,
    Prediction,
    Region,
    Timeline,
    Trace,
    allocations,
    is_kernel,
    peak_parts,
    replay,
    simulate,
    throughput,
    unfused,
)
from memfit.levers import check_lever_names, circumstances, device_under
from memfit.planner.captures import capture_levers
from memfit.ranks import of_engine
from memfit.recomputation import FUSED_ERROR
from memfit.workload import Workload

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CACHING = ("cuda", "xpu")
"""Kinds of device with the caching allocator that is simulated (`c10/cuda`, and `c10/xpu` after it)."""
_FALLBACK_ERROR = 0.25  # of a GPU's peak predicted from the CPU's program: 8 % was seen on a small GPT


def costs_of(traces: Iterable[Trace], device: Device, progress: StageProgress | None = None) -> CostTable:
    """Return the costs of some traces' operators: measured on a device that is here, modelled for others.

    Traces in TF32 have the operators of those in fp32, and cost less: they need a table of their own.
    """
    traces = [unfused(trace) for trace in traces]
    if device.kind == "cpu":
        costs = calibrate(traces, progress)
    elif device.is_here:
        costs = measured_costs(traces, device, progress, matmul=_matmul(traces))
    else:
        costs = roofline(traces, device, matmul=_matmul(traces))
        costs = costs if hardware.shim.is_loaded() else replace(costs, peak_error=_FALLBACK_ERROR)
    for sharding in {trace.sharding for trace in traces} - {None}:
        assert sharding is not None
        costs = with_collectives(costs, [t for t in traces if t.sharding == sharding], links_of(device, sharding))
    return costs


def _matmul(traces: list[Trace]) -> Matmul:
    return "high" if traces and all(trace.precision == "tf32" for trace in traces) else "highest"


def predict(
    trace: Trace, costs: CostTable, device: Device, tokens_per_sample: int | None = None
) -> tuple[Prediction, Timeline]:
    """Return the prediction for a captured step, and its timeline."""
    timeline = simulate(trace, costs)
    allocated, reserved, retries, by_category = timeline.peak_bytes, None, None, timeline.at_peak()
    if device.kind != "cpu":
        events = allocations(trace, costs)
        report = replay(events, device.allocator, total_bytes=device.memory_bytes)
        allocated = report.peak_allocated_bytes
        by_category["rounding"] = allocated - timeline.peak_bytes
        if device.kind in CACHING:
            reserved = report.peak_reserved_bytes
            retries = 0
            if reserved > device.usable_bytes:  # how often a full device has its cache given back, where that is enough
                full = replay(events, device.allocator, device.usable_bytes, total_bytes=device.memory_bytes)
                retries = None if full.num_ooms else full.num_alloc_retries
    upper_bytes = _upper_bytes(trace, costs, reserved or allocated)
    left_bytes = sum(storage.nbytes for storage in trace.storages if storage.death >= len(trace.ops))
    phase_seconds = dict.fromkeys(("forward", "backward", "recompute", "optimizer"), 0.0)
    for phase, seconds, times in zip(timeline.phases, timeline.seconds, trace.repeats.tolist(), strict=True):
        phase_seconds[phase] += seconds * times
    notes = [*trace.notes, *costs.notes]
    if trace.precision in ("bf16-mixed", "bf16-true") and not supports(device, "bfloat16"):
        notes.append(f"{device.name} has no bfloat16 units: PyTorch emulates them, slowly; use precision='16-mixed'")
    if trace.precision != "bf16-true" and any(p.itemsize == 2 and p.group >= 0 for p in trace.parameters):
        notes.append(
            "Workload.model has 16-bit weights: an update below 1/256 of its weight is lost. Build it in"
            " fp32, or use precision='bf16-true' with Workload.bf16_updates"
        )
    prediction = Prediction(
        peak_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_upper_bytes=upper_bytes,
        step_seconds=timeline.step_seconds,
        after_step_bytes=left_bytes + costs.resident_workspace_bytes,
        phase_seconds={phase: seconds for phase, seconds in phase_seconds.items() if seconds},
        by_category=by_category,
        where=timeline.where(),
        largest=peak_parts(trace, timeline),
        device_bytes=device.usable_bytes,
        context_bytes=device.context_bytes if device.kind == "cuda" else None,
        context_upper_bytes=device.context_bytes + kernels_bytes(trace) if device.kind == "cuda" else None,
        retries=retries,
        throughput=throughput(
            trace,
            costs,
            device,
            step_seconds=timeline.step_seconds,
            tokens_per_sample=tokens_per_sample,
            matmul=_matmul([trace]),
        ),
        notes=notes,
    )
    return prediction, timeline


def _upper_bytes(trace: Trace, costs: CostTable, peak_bytes: int) -> int:
    """Return the upper end of a step's peak: it is wider where a compiler orders kernels by itself."""
    held_bytes = sum(storage.nbytes for storage in trace.storages if storage.birth < 0)
    compiled_bytes = max(0, peak_bytes - held_bytes) if any(map(is_kernel, trace.signatures)) else 0
    return int((peak_bytes + compiled_bytes * FUSED_ERROR) * (1 + costs.peak_error) * (1 + trace.slack))


def upper_bytes_on_paper(trace: Trace, costs: CostTable, device: Device, regions: Sequence[Region]) -> int:
    """Return the upper end of a step's peak with regions recomputed, from its trace without them."""
    if device.kind == "cpu":
        return _upper_bytes(trace, costs, simulate(trace, costs, regions).peak_bytes)
    report = replay(allocations(trace, costs, regions), device.allocator, total_bytes=device.memory_bytes)
    reserves = device.kind in CACHING
    return _upper_bytes(trace, costs, report.peak_reserved_bytes if reserves else report.peak_allocated_bytes)


def predicted_under(plan: Plan, workload: Workload, levers: Levers | None = None) -> tuple[Prediction, Trace]:
    """Capture a step under a plan that was made for others, or under levers in place of its own, and predict it."""
    levers = levers or plan.levers
    device = device_under(levers, find_device(plan.device))
    trace = of_engine(capture_levers(workload, levers, device), plan.engine)
    return predict(trace, costs_of([trace], device), device)[0], trace


def check_precision(precision: str, argument: str, device: Device, workload: Workload) -> None:
    """Refuse a precision that is unknown, that the device has no units for, or whose needs the workload leaves open."""
    if precision not in PRECISIONS:
        raise UsageError(f"{argument}={precision!r} is unknown: use one of {', '.join(PRECISIONS)}")
    used = {precision} | circumstances(workload, device)
    check_lever_names(used, where=f"{argument}={precision!r} on {device.name}: ")

"""The throughput of a predicted step: samples, tokens and operations per second."""

from __future__ import annotations

from collections import defaultdict

from memfit.ir.device import Device
from memfit.ir.display import Shown
from memfit.ir.flops import Matmul, call_flops, peak_flops, runs_in_tf32
from memfit.ir.operator_classes import ATTENTION, CONVOLUTIONS, MATRIX, OPTIMIZER, RECURRENT, operator_class
from memfit.ir.operator_costs import CostTable
from memfit.ir.simulation import repeats
from memfit.ir.trace import Trace

_COUNTED = (MATRIX, CONVOLUTIONS, RECURRENT, ATTENTION)


class Throughput(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The throughput of a step.

    Attributes:
        step_seconds: Predicted time, with every microbatch.
        step_error: Relative half-width of its interval; an estimate unless the costs were measured.
        measured: Whether every operator's time was measured on the device.
        samples_per_second: Samples of the global batch per second.
        tokens_per_second: Tokens per second; None where samples have no tokens.
        seconds_by_class: Seconds by class of operator, largest first; the optimizer's operators are one class.
        model_flops: Operations of a step's forward and backward pass; recomputation does not count.
        hardware_flops: Operations of the kernels, recomputation included.
        peak_dtype: The dtype of most of the model's operations ("tf32" where the device uses it).
        peak_flops: The device's peak rate for them; 0 if unknown.
        model_utilisation: MFU: model operations per second, relative to the peak; None if unknown.
        hardware_utilisation: HFU: hardware operations per second, relative to the peak; None if unknown.
    """

    step_seconds: float
    step_error: float
    measured: bool
    samples_per_second: float
    tokens_per_second: float | None
    seconds_by_class: dict[str, float]
    model_flops: int
    hardware_flops: int
    peak_dtype: str
    peak_flops: float
    model_utilisation: float | None
    hardware_utilisation: float | None


def throughput(
    trace: Trace,
    costs: CostTable,
    device: Device,
    *,
    step_seconds: float | None = None,
    tokens_per_sample: int | None = None,
    matmul: Matmul = "highest",
) -> Throughput:
    """Return the throughput of a captured step.

    Utilisation follows Chowdhery et al. 2022 (PaLM, appendix B), see `ir.flops`: model operations count attention in
    full, causal or not, and no recomputation; hardware operations are those of the kernels.

    Args:
        trace: The step as it runs, recomputation included.
        step_seconds: Predicted time of the step; None to add up its operators.
        tokens_per_sample: Tokens in a sample; None without tokens.
        matmul: Whether float32 products may use TF32.
    """
    by_class = seconds_by_class(trace, costs)
    seconds = step_seconds if step_seconds is not None else sum(by_class.values())
    model, hardware, dtype, kind = _flops(trace)
    peak = peak_flops(device, dtype, kind, matmul)
    samples = trace.batch_size / seconds if seconds else 0.0
    known = bool(peak and seconds)
    return Throughput(
        step_seconds=seconds,
        step_error=costs.step_error,
        measured=all(costs.of(trace.signatures[op.signature]).measured for op in trace.ops),
        samples_per_second=samples,
        tokens_per_second=samples * tokens_per_sample if tokens_per_sample else None,
        seconds_by_class=by_class,
        model_flops=model,
        hardware_flops=hardware,
        peak_dtype="tf32" if runs_in_tf32(device, dtype, kind, matmul) else dtype,
        peak_flops=peak,
        model_utilisation=model / seconds / peak if known else None,
        hardware_utilisation=hardware / seconds / peak if known else None,
    )


def seconds_by_class(trace: Trace, costs: CostTable) -> dict[str, float]:
    """Return a step's seconds by class of operator, largest first; the optimizer's operators are one class."""
    total: dict[str, float] = defaultdict(float)
    for op, times in zip(trace.ops, repeats(trace), strict=True):
        kind = OPTIMIZER if op.phase == "optimizer" else operator_class(op.name)
        total[kind] += float(times) * costs.seconds_of(trace.signatures[op.signature])
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _flops(trace: Trace) -> tuple[int, int, str, str]:
    """Return a step's model and hardware operations, and the dtype and class of most model operations."""
    model = hardware = 0
    by_kind: dict[tuple[str, str], int] = defaultdict(int)
    for op, times in zip(trace.ops, repeats(trace), strict=True):
        kind = operator_class(op.name)
        if op.phase == "optimizer" or kind not in _COUNTED:
            continue
        work = trace.works[op.signature]
        count = call_flops(op.name, trace.signatures[op.signature], work)
        hardware += int(times * count.hardware)
        if op.phase != "recompute":
            model += int(times * count.model)
            by_kind[work.dtype, kind] += int(times * count.model)
    dtype, kind = max(by_kind, key=lambda k: by_kind[k], default=("float32", MATRIX))
    return model, hardware, dtype, kind

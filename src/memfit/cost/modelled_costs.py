"""Costs of operators on a device that is not here, by the roofline model, and of making a compiled step's code.

Williams, Waterman, Patterson (2009), *Roofline: An Insightful Visual Performance Model for Multicore Architectures*: a
kernel's time is the larger of its arithmetic and its memory traffic, each at the rate that its class of operator
attains (`efficiency.toml`, with sources), and times what was measured on a device like it
(`memfit.cost.error_bars`). `benchmarks/roofline.py` fits the form to this CPU.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import Any

import msgspec

from memfit.cost.error_bars import measured_like
from memfit.cost.operator_call import (
    OperatorCall,
    distinct_calls,
    layout_bytes,
    repeated_bytes,
    resident_bytes,
    traffic_bytes,
    workspace_bytes,
)
from memfit.errors import UsageError
from memfit.ir import (
    ATTENTION,
    CONVOLUTIONS,
    COPIES,
    ITEM_BYTES,
    MATRIX,
    RECURRENT,
    CostTable,
    Device,
    Matmul,
    OpCost,
    Tensor,
    Trace,
    is_kernel,
    operator_class,
)

STEP_ERROR = 0.30  # an estimate, not measured: see `CostTable.step_error`
PEAK_ERROR = 0.05
PEAK_ERROR_CONVOLUTIONS = 0.10  # cuDNN's workspaces are bounds, and wide ones
_LOAD_BYTES = 16  # of a thread at once
_ARITHMETIC = (MATRIX, CONVOLUTIONS, RECURRENT, ATTENTION)


class AttainedRates(msgspec.Struct, frozen=True):
    """The rates that a class of operators attains on a device.

    Attributes:
        flops_per_second: The arithmetic rate of large calls.
        bytes_per_second: The memory rate of large calls.
        fixed_seconds: The time of a call beyond its work.
        half_width: The narrowest dimension of a product that attains half of the arithmetic rate.
    """

    flops_per_second: float
    bytes_per_second: float
    fixed_seconds: float
    half_width: float = 0.0

    def seconds(self, flops: float, nbytes: float, width: float = math.inf) -> float:
        """Return the time of a call, by its operations, its memory traffic, and its `narrowest_dimension`."""
        arithmetic = flops / self.flops_per_second * (1 + self.half_width / width)
        return max(arithmetic, nbytes / self.bytes_per_second) + self.fixed_seconds


def roofline(traces: Iterable[Trace], device: Device, *, matmul: Matmul = "highest") -> CostTable:
    """Return the costs of the operators of some traces on a device, without running any.

    Each operator's seconds are the larger of its kernel's time and `device.launch_seconds`, so that they add up; the
    dispatch of later operators that a long kernel hides is not subtracted.

    Raises:
        UsageError: The device's figures are missing, or the rate of a step's copies to the host.
    """
    check_figures(device)
    traces = list(traces)
    ops: dict[str, OpCost] = {}
    like = measured_like(device)
    for call in distinct_calls(traces, device, matmul):
        if call.copies:
            if not device.link_bytes_per_second:
                raise UsageError(
                    f"device={device.name!r} has no link_bytes_per_second, the rate of copies to the host: add it"
                )
            ops[call.signature] = OpCost(call.largest_bytes / device.link_bytes_per_second, 0, False)
            continue
        factor = like.time_factor(call.kind, call.work.dtype) if like is not None else 1.0
        seconds = max(kernel_seconds(call) * factor, floor_seconds(call))
        ops[call.signature] = OpCost(seconds, workspace_bytes(call), False)
    return CostTable(
        device=device.name,
        torch_version=traces[0].torch_version if traces else "",
        threads=0,
        ops=ops,
        dispatch_seconds=0.0,
        checkpoint_seconds=figures()["device"]["checkpoint_seconds"],
        selective_op_seconds=figures()["device"]["selective_op_seconds"],
        peak_error=peak_error(traces),
        step_error=STEP_ERROR,
        resident_workspace_bytes=max((resident_bytes(trace, device) for trace in traces), default=0),
        link_bytes_per_second=device.link_bytes_per_second,
        notes=[f"times are modelled, and corrected by measured steps on {like.device} ({like.date})"] if like else [],
    )


def peak_error(traces: Iterable[Trace]) -> float:
    """Return the estimated error of predicted peaks."""
    convolves = any(operator_class(op.name) == CONVOLUTIONS for trace in traces for op in trace.ops)
    return PEAK_ERROR_CONVOLUTIONS if convolves else PEAK_ERROR


def check_figures(device: Device) -> None:
    """Check that a device has the figures that times are computed from.

    Raises:
        UsageError: A figure is missing.
    """
    needed = {
        "bandwidth_bytes_per_second": device.bandwidth_bytes_per_second,
        "vector_flops": device.vector_flops.get("float32", 0.0),
        "cores": device.cores,
    }
    missing = [name for name, value in needed.items() if value <= 0]
    if missing:
        raise UsageError(
            f"device={device.name!r} has no {', '.join(missing)}, so memfit can't predict its times: add"
            f" {'them' if len(missing) > 1 else 'it'} to its entry (vector_flops needs 'float32')"
        )


def floor_seconds(call: OperatorCall) -> float:
    """Return the least time from this operator to the next in eager mode, whatever its kernel's time."""
    launch_seconds = call.device.launch_seconds
    if not call.runs_kernel:
        return float(figures()["device"]["view_share"] * launch_seconds)
    if call.kind != RECURRENT:
        return launch_seconds
    # A layer's time steps wait for one another.
    first, steps = call.given.get(0, "input"), 1
    if isinstance(first, Tensor) and len(first.shape) > 2:
        layers = call.given.get(9, "num_layers") if "_cudnn_rnn" in call.signature else 1
        steps = first.shape[0] * (layers if isinstance(layers, int) else 1)
    step_seconds = float(figures()["device"]["recurrent_step_seconds"])
    return max(launch_seconds, step_seconds * steps * (2 if call.is_backward else 1))


def kernel_seconds(call: OperatorCall) -> float:
    """Return the time of an operator's kernels, by the published and estimated efficiencies."""
    if not call.runs_kernel:
        return 0.0
    device = call.device
    nbytes: float = traffic_bytes(call) + repeated_bytes(call)
    if call.work.read_bytes + call.work.write_bytes <= device.cache_bytes:
        nbytes = nbytes / figures()["device"]["cache_speedup"]
    copied = 2 * layout_bytes(call)  # read and written, by kernels of their own
    copies = copied / float(figures()[COPIES]["traffic"] * device.bandwidth_bytes_per_second)
    rates = attained_rates(call)
    return rates.seconds(call.flops, nbytes, narrowest_dimension(call)) + copies + _chain_seconds(call)


def _chain_seconds(call: OperatorCall) -> float:
    """Return the time of reads that wait for one another: the loss of each target, 32 at a time in one block.

    `NLLLoss.cu`, nll_loss_forward_reduce_cuda_kernel_2d and its backward kernel: a single block of 32 threads reduces
    all targets, each by its class, which is read first.
    """
    if call.base not in ("nll_loss_forward", "nll_loss_backward") or not call.given.tensors:
        return 0.0
    first = 2 if call.is_backward else 1
    target, reduction = call.given.get(first, "target"), call.given.get(first + 2, "reduction", 1)
    if not isinstance(target, Tensor) or reduction == 0:
        return 0.0
    return float(figures()["device"]["chained_read_seconds"]) * math.ceil(target.elements / 32)


def attained_rates(call: OperatorCall) -> AttainedRates:
    """Return the rates that a large call attains, and its fixed time."""
    kind, work, device = call.kind, call.work, call.device
    shared, own = figures()["device"], figures().get(kind, figures()["other"])
    flops_per_second = _arithmetic_rate(call)
    fixed = float(shared["kernel_seconds"])
    if kind in (MATRIX, CONVOLUTIONS) and call.flops:
        item_bytes = ITEM_BYTES.get(work.dtype, 1)
        depth = min(call.flops * item_bytes / (2 * max(1, work.write_bytes)), shared["block_depth"])
        # On average the last wave of thread blocks idles for half of a block's share of the product.
        block = 2 * min(shared["block_elements"], work.write_bytes / item_bytes) * depth
        fixed += 0.5 * block * device.cores / flops_per_second
    half_width = float(shared["half_width"]) if kind in (MATRIX, CONVOLUTIONS) else 0.0
    return AttainedRates(flops_per_second, own["traffic"] * device.bandwidth_bytes_per_second, fixed, half_width)


def narrowest_dimension(call: OperatorCall) -> float:
    """Return the narrowest dimension of a product, or the fewer channels of a convolution; infinite for others.

    It matters since kernels compute whole tiles, however little of them is used.
    """
    if call.kind == CONVOLUTIONS:
        weight = call.weight
        if weight is None or _is_depthwise(call):
            return math.inf  # kernels of one channel compute no tiles
        return max(1, min(weight.shape[0] // call.groups, weight.shape[1]))
    if call.kind != MATRIX:
        return math.inf
    factors = [t.shape[-2:] for t in call.given.tensors[-2:] if len(t.shape) > 1]
    return max(1, min(map(min, factors))) if len(factors) == 2 else math.inf


def _arithmetic_rate(call: OperatorCall) -> float:
    kind, dtype, device = call.kind, call.work.dtype, call.device
    vector = device.vector_flops["float32"]
    if kind not in _ARITHMETIC:
        return vector
    own = figures()[kind]
    if kind == CONVOLUTIONS and _is_depthwise(call):
        return float(own["vector"] * vector)
    peak = call.peak_flops or vector
    if peak <= device.vector_flops.get(dtype, vector):
        return float(own["vector"] * peak)
    if kind == ATTENTION:
        share = _attention_share(call)
    else:
        share = own.get("tf32" if dtype == "float32" else "matrix", own["matrix"])
        if kind == MATRIX and not _is_aligned(call):
            share *= own["unaligned"]
    # Where the card halves the rate of its matrix units, what else limits a kernel (loads, addresses, synchronisation)
    # is the same as on a card with the full rate, so that it reaches as much of that rate, up to a ceiling.
    if device.float32_accumulation_share is not None:
        ceiling = float(figures()["device"]["halved_ceiling"])
        share = max(share, min(share / device.float32_accumulation_share, ceiling))
    return float(peak * share)


def _is_aligned(call: OperatorCall) -> bool:
    """Tell whether the rows of a product's factors begin at multiples of 16 bytes, which wide loads need."""
    for factor in call.given.tensors[-2:]:
        steps = [step for step in factor.strides[-2:] if step > 1]
        if any(step * ITEM_BYTES.get(factor.dtype, 1) % _LOAD_BYTES for step in steps):
            return False
    return True


def _attention_share(call: OperatorCall) -> float:
    """Return the share of the peak rate that a fused attention kernel attains on this generation of GPUs."""
    own, device = figures()[ATTENTION], call.device
    kernel = next((k for k in ("flash", "efficient", "cudnn") if k in call.name), None)
    if kernel is None:
        return float(own["matrix"])
    table = own[kernel]
    if device.vendor == "nvidia" and device.capability is not None:
        table = table.get(str(device.capability[0]), table)
    return float(table["backward" if call.is_backward else "forward"])


def _is_depthwise(call: OperatorCall) -> bool:
    """Tell whether a convolution has one input channel for each group: such kernels use no matrix units."""
    return call.weight is not None and call.groups > 1 and call.weight.shape[1] == 1


@functools.cache
def figures() -> dict[str, Any]:
    """Return `efficiency.toml`: the attained shares of the peak rates, by class of operator, with sources."""
    return tomllib.loads(resources.files("memfit.cost").joinpath("efficiency.toml").read_text("utf-8"))


# [How long code takes to make] Measured on two cores of an AMD EPYC with torch 2.13 and g++ 12, in CPU seconds with one
# process that compiles, for six steps: perceptrons of 2 and 8 blocks, byte-level Transformers of 1 and 4 layers, a
# GPT-2 of 4 layers and a ResNet. They took 16 to 55 s, and these constants give each of them to within 16 %. No
# benchmark holds that yet, and another machine takes other times: it is an estimate to be said, and nothing is chosen
# by it.
_HEADER_SECONDS = 10.0
"""PyTorch's headers, compiled once before the kernels."""
_OPERATOR_SECONDS = 0.016
"""Tracing, partitioning and lowering, in Python, for each operator of the step."""
_KERNEL_SECONDS = 0.3
"""The C++ compiler, for each kernel."""


def kernels_of(trace: Trace) -> int:
    """Return how many kernels code is made of, in the trace of a compiled step."""
    return sum(map(is_kernel, trace.signatures))


def code_seconds(trace: Trace, processes: int) -> float:
    """Return about how long a captured step's code takes to make on a CPU without kept code, some kernels at a time."""
    return _HEADER_SECONDS + _OPERATOR_SECONDS * len(trace.ops) + _KERNEL_SECONDS * kernels_of(trace) / processes

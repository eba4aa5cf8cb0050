"""Costs of operators on a device that is not here: what they do, divided by what the device reaches.

The roofline (Williams, Waterman, Patterson 2009, *Roofline: An Insightful Visual Performance Model for
Multicore Architectures*): a kernel takes the larger of its arithmetic and its memory traffic, each at the
rate that its class of operator reaches (`efficiency.toml` says which, and from where). Two terms are added
for calls that don't fill the device: half of a thread block's share of a matrix product, which is what the
last wave of blocks idles on average, and the time that any kernel takes. In eager mode no operator follows
the one before it sooner than `Device.launch_seconds`, which is the floor.

Not yet measured on CUDA. `benchmarks/roofline.py` fits the same form to this CPU, to show that it holds.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable
from importlib import resources
from typing import Any

import msgspec

from memfit.cost.hidden import layout_bytes, resident_bytes, workspace_bytes
from memfit.cost.traffic import traffic_bytes
from memfit.errors import UsageError
from memfit.ir.arguments import ITEM_BYTES, Tensor, arguments
from memfit.ir.cost import CostTable, OpCost
from memfit.ir.device import Device
from memfit.ir.flops import Matmul, base_name, call_flops, peak_flops
from memfit.ir.offload import COPY_IN, COPY_OUT
from memfit.ir.operators import ATTENTION, CONVOLUTIONS, COPIES, MATRIX, RECURRENT, VIEWS, operator_class
from memfit.ir.trace import Trace, Work

STEP_ERROR = 0.30  # an estimate, not measured: see `CostTable.step_error`
PEAK_ERROR = 0.05
PEAK_ERROR_CONVOLUTIONS = 0.10  # cuDNN's workspaces are bounds, and wide ones
_ARITHMETIC = (MATRIX, CONVOLUTIONS, RECURRENT, ATTENTION)


class Reach(msgspec.Struct, frozen=True):
    """What operators of a class reach on a device.

    Attributes:
        flops_per_second: Of large calls.
        bytes_per_second: Of large calls.
        fixed_seconds: What a call takes beyond its work.
        half_width: The narrowest dimension of a product at which half of the rate is reached.
    """

    flops_per_second: float
    bytes_per_second: float
    fixed_seconds: float
    half_width: float = 0.0

    def seconds(self, flops: float, nbytes: float, width: float = math.inf) -> float:
        """Return the time of a call.

        Args:
            flops: That it does.
            nbytes: That it moves.
            width: The narrowest dimension of its product; see `narrowest`.
        """
        arithmetic = flops / self.flops_per_second * (1 + self.half_width / width)
        return max(arithmetic, nbytes / self.bytes_per_second) + self.fixed_seconds


def roofline(traces: Iterable[Trace], device: Device, *, matmul: Matmul = "highest") -> CostTable:
    """Return the costs of the operators of some traces on a device, without running any.

    Each operator's seconds are the larger of its kernel's time and `device.launch_seconds`, so that they add
    up; what a long kernel hides of the dispatch of later ones is not subtracted (`ir.stream`).

    Args:
        traces: Steps captured for this kind of device.
        device: What they will run on; its rates and bandwidth must be known.
        matmul: What the program passes to `torch.set_float32_matmul_precision`.

    Raises:
        UsageError: The device's figures are missing.
    """
    check_figures(device)
    traces = list(traces)
    ops: dict[str, OpCost] = {}
    for trace in traces:
        for op in trace.ops:
            text = trace.signatures[op.signature]
            if text not in ops:
                ops[text] = _op_cost(op.name, text, trace.works[op.signature], device, matmul)
    convolves = any(operator_class(op.name) == CONVOLUTIONS for trace in traces for op in trace.ops)
    return CostTable(
        device=device.name,
        torch_version=traces[0].torch_version if traces else "",
        threads=0,
        ops=ops,
        dispatch_seconds=0.0,
        checkpoint_seconds=figures()["device"]["checkpoint_seconds"],
        selective_op_seconds=figures()["device"]["selective_op_seconds"],
        peak_error=PEAK_ERROR_CONVOLUTIONS if convolves else PEAK_ERROR,
        step_error=STEP_ERROR,
        resident_workspace_bytes=max((resident_bytes(trace, device) for trace in traces), default=0),
        link_bytes_per_second=device.link_bytes_per_second,
    )


def check_figures(device: Device) -> None:
    """Check that a device has the figures that times are made of.

    Raises:
        UsageError: It has not.
    """
    needed = {
        "bandwidth_bytes_per_second": device.bandwidth_bytes_per_second,
        "vector_flops": device.vector_flops.get("float32", 0.0),
        "cores": device.cores,
    }
    missing = [name for name, value in needed.items() if value <= 0]
    if missing:
        raise UsageError(
            f"device={device.name!r} has no {', '.join(missing)}, so that no time can be predicted for it: "
            f"give its entry {'them' if len(missing) > 1 else 'it'} (vector_flops needs 'float32')"
        )


def _op_cost(name: str, signature: str, work: Work, device: Device, matmul: Matmul) -> OpCost:
    if name in (COPY_OUT, COPY_IN):
        return OpCost(_copy_seconds(signature, device), 0, False)
    seconds = max(kernel_seconds(name, signature, work, device, matmul), floor_seconds(name, signature, work, device))
    return OpCost(seconds, workspace_bytes(name, signature, work, device), False)


def _copy_seconds(signature: str, device: Device) -> float:
    """Return how long a copy between host and device takes."""
    nbytes = max((math.prod(t.shape) * ITEM_BYTES.get(t.dtype, 1) for t in arguments(signature).tensors), default=0)
    return nbytes / device.link_bytes_per_second if device.link_bytes_per_second else 0.0


def floor_seconds(name: str, signature: str, work: Work, device: Device) -> float:
    """Return the least time from this operator to the next, whatever its kernel does."""
    if not runs_kernel(name, work):
        return float(figures()["device"]["view_share"] * device.launch_seconds)
    if operator_class(name) != RECURRENT:
        return device.launch_seconds
    step = float(figures()["device"]["recurrent_step_seconds"])
    return max(device.launch_seconds, step * _time_steps(signature) * (2 if "backward" in name else 1))


def _time_steps(signature: str) -> int:
    """Return how many steps of a recurrent layer wait for one another."""
    given = arguments(signature)
    first = given.get(0, "input")
    if not isinstance(first, Tensor) or len(first.shape) < 3:
        return 1
    layers = given.get(9, "num_layers") if "_cudnn_rnn" in signature else 1
    return first.shape[0] * (layers if isinstance(layers, int) else 1)


def runs_kernel(name: str, work: Work) -> bool:
    """Tell whether an operator runs anything on the device; allocations don't, though their outputs are new."""
    return work.kernel and operator_class(name) != VIEWS


def kernel_seconds(name: str, signature: str, work: Work, device: Device, matmul: Matmul = "highest") -> float:
    """Return how long an operator's kernels run.

    Args:
        name: Its overload.
        signature: The call.
        work: What the call does.
        device: What it runs on.
        matmul: Whether float32 products may use TF32.
    """
    if not runs_kernel(name, work):
        return 0.0
    nbytes = traffic_bytes(name, signature, work)
    flops = call_flops(name, signature, work).hardware
    reached = reach(name, signature, work, device, matmul)
    if work.read_bytes + work.write_bytes <= device.cache_bytes:
        nbytes = nbytes / figures()["device"]["cache_speedup"]
    copied = 2 * layout_bytes(name, signature, work, device)  # read and written, by kernels of their own
    copies = copied / float(figures()[COPIES]["traffic"] * device.bandwidth_bytes_per_second)
    return reached.seconds(flops, nbytes, narrowest(name, signature)) + copies


def reach(name: str, signature: str, work: Work, device: Device, matmul: Matmul = "highest") -> Reach:
    """Return the rates that a call reaches once it is large, and what it takes beyond."""
    kind = operator_class(name)
    shared, own = figures()["device"], figures().get(kind, figures()["other"])
    flops_per_second = _arithmetic_rate(name, signature, work, device, matmul)
    fixed = float(shared["kernel_seconds"])
    if kind in (MATRIX, CONVOLUTIONS) and work.flops:
        depth = min(work.flops * _item_bytes(work) / (2 * max(1, work.write_bytes)), shared["block_depth"])
        block = 2 * min(shared["block_elements"], work.write_bytes / _item_bytes(work)) * depth
        fixed += 0.5 * block * device.cores / flops_per_second
    half_width = float(shared["half_width"]) if kind in (MATRIX, CONVOLUTIONS) else 0.0
    return Reach(flops_per_second, own["traffic"] * device.bandwidth_bytes_per_second, fixed, half_width)


def narrowest(name: str, signature: str) -> float:
    """Return the narrowest dimension of a product, or the fewer of a convolution's channels; infinite for others.

    Tiles are computed whole, however little of them is used.
    """
    kind, given = operator_class(name), arguments(signature)
    if kind == CONVOLUTIONS:
        weight = given.get(2 if "backward" in base_name(name) else 1, "weight")
        return max(1, min(weight.shape[:2])) if isinstance(weight, Tensor) else math.inf
    factors = [t.shape[-2:] for t in given.tensors[-2:] if len(t.shape) > 1]
    return max(1, min(map(min, factors))) if kind == MATRIX and len(factors) == 2 else math.inf


def _item_bytes(work: Work) -> int:
    return ITEM_BYTES.get(work.dtype, 1)


def _arithmetic_rate(name: str, signature: str, work: Work, device: Device, matmul: Matmul) -> float:
    kind = operator_class(name)
    vector = device.vector_flops["float32"]
    if kind not in _ARITHMETIC:
        return vector
    own = figures()[kind]
    if kind == CONVOLUTIONS and _is_depthwise(name, signature):
        return float(own["vector"] * vector)
    peak = peak_flops(device, work.dtype, kind, matmul) or vector
    if peak <= device.vector_flops.get(work.dtype, vector):
        return float(own["vector"] * peak)
    if kind == ATTENTION:
        return peak * _attention_share(name, device)
    return float(peak * own.get("tf32" if work.dtype == "float32" else "matrix", own["matrix"]))


def _attention_share(name: str, device: Device) -> float:
    """Return the share of the peak that a fused attention kernel reaches on this generation."""
    own = figures()[ATTENTION]
    kernel = next((k for k in ("flash", "efficient", "cudnn") if k in name), None)
    if kernel is None:
        return float(own["matrix"])
    table = own[kernel]
    if device.vendor == "nvidia" and device.capability is not None:
        table = table.get(str(device.capability[0]), table)
    return float(table["backward" if "backward" in name else "forward"])


def _is_depthwise(name: str, signature: str) -> bool:
    """Tell whether a convolution has one input channel for each group: such kernels use no matrix units."""
    backward = "backward" in base_name(name)
    given = arguments(signature)
    weight, groups = given.get(2 if backward else 1, "weight"), given.get(9 if backward else 8, "groups", 1)
    return isinstance(weight, Tensor) and isinstance(groups, int) and groups > 1 and weight.shape[1] == 1


@functools.cache
def figures() -> dict[str, Any]:
    """Return `efficiency.toml`: what is reached, by class of operator, with sources."""
    return tomllib.loads(resources.files("memfit.cost").joinpath("efficiency.toml").read_text("utf-8"))

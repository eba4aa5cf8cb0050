"""Costs of operators on a device, and of fused kernels; their operations, a device's peak rates, and a throughput.

There are two counts. *Model* operations follow the convention of model FLOPs utilisation (Chowdhery et al. 2022, *PaLM:
Scaling Language Modeling with Pathways*, appendix B): attention counts the whole matrix of scores, causal or not, and
its backward pass is twice its forward pass. *Hardware* operations are those of the kernels: fused causal attention
skips masked blocks, and its backward pass computes the scores again (Dao 2023, *FlashAttention-2*, section 3.1).
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.ir.codec import Shown
from memfit.ir.device import Device
from memfit.ir.operators import (
    ATTENTION,
    CONVOLUTIONS,
    MATRIX,
    OPTIMIZER,
    RECURRENT,
    Arguments,
    Tensor,
    arguments,
    base_name,
    is_kernel,
    members_of,
    operator_class,
    reused_bytes_of,
)
from memfit.ir.trace import Op, Trace, Work


def unfused(trace: Trace) -> Trace:
    """Return a trace with the operators of its kernels one by one, for their costs; its storages are of no use then."""
    if not any(map(is_kernel, trace.signatures)):
        return trace
    index = {text: number for number, text in enumerate(trace.signatures)}
    ops: list[Op] = []
    for op in trace.ops:
        text = trace.signatures[op.signature]
        if not is_kernel(text):
            ops.append(op)
            continue
        for member in members_of(text):
            ops.append(replace(op, name=str(json.loads(member)["op"]), signature=index[member]))
    used = [text for text in trace.signatures if not is_kernel(text)]
    number = {index[text]: position for position, text in enumerate(used)}
    return replace(
        trace,
        ops=[replace(op, signature=number[op.signature]) for op in ops],
        signatures=used,
        works=[trace.works[index[text]] for text in used],
    )


class OpCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of one operator call.

    Attributes:
        seconds: Shortest time of several calls.
        workspace_bytes: Peak of the bytes that it allocates beyond its outputs.
        measured: Whether both were measured on the device; else they are estimates.
        coarse: Whether the time is that of one or two calls, since it was a small part of its step.
    """

    seconds: float
    workspace_bytes: int
    measured: bool
    coarse: bool = False


class CostTable(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of the operators of some traces, by signature.

    Attributes:
        dispatch_seconds: Overhead of each operator of a step: Python, autograd, modules.
        checkpoint_seconds: Overhead of one recomputation beyond the operators that run again.
        selective_op_seconds: Overhead of each operator of a module that makes outputs that a region keeps, once in the
            forward pass and once in the recomputation.
        peak_error: Relative distance of the upper end of a predicted peak's interval.
        step_error: Relative half-width of a predicted step time's interval.
        resident_workspace_bytes: Workspaces that libraries keep in the allocator for the whole program.
        link_bytes_per_second: Bandwidth between host and device, in one direction; 0 where there is no link.
    """

    schema: str = "memfit.costs/2"
    device: str
    torch_version: str
    threads: int
    ops: dict[str, OpCost]
    dispatch_seconds: float
    checkpoint_seconds: float
    selective_op_seconds: float
    peak_error: float
    step_error: float = 0.2
    resident_workspace_bytes: int = 0
    link_bytes_per_second: float = 0.0
    notes: list[str] = []

    def of(self, signature: str) -> OpCost:
        """Return the cost of a signature; of an unknown one 0, not measured."""
        if not is_kernel(signature):
            return self.ops.get(signature, _UNKNOWN)
        members = members_of(signature)  # of which the slowest takes the kernel's time
        costs = [self.of(member) for member in members]
        # Generated code has no workspace, a library's has its own; bytes written in place count as one below zero.
        is_library = len(members) == 1 and members[0].startswith(_LIBRARY)
        workspace_bytes = costs[0].workspace_bytes if is_library else 0
        return OpCost(
            max((cost.seconds for cost in costs), default=0.0),
            workspace_bytes - reused_bytes_of(signature),
            all(cost.measured for cost in costs),
        )

    def seconds_of(self, signature: str) -> float:
        """Return an operator's share of a step's time, dispatch included: compiled code launches kernels by itself."""
        dispatch_seconds = 0.0 if is_kernel(signature) else self.dispatch_seconds
        return self.of(signature).seconds + dispatch_seconds

    def captured_overheads(self, trace: Trace) -> dict[int, float]:
        """Return the overhead of a captured step's own recomputations beyond their operators, by their first operator.

        A compiled graph computes again by operators of its own, with no call around them that costs any.
        """
        selective, found = set(trace.selective), dict[int, float]()
        for run in trace.recomputed_runs:
            if is_kernel(trace.signatures[trace.ops[run[0]].signature]):
                continue
            beside = sum(trace.fqn_of(trace.ops[index].call) in selective for index in run) if selective else 0
            found[run[0]] = self.checkpoint_seconds + self.selective_op_seconds * beside
        return found

    def op_seconds(self, trace: Trace) -> npt.NDArray[np.float64]:
        """Return the seconds of each operator of a trace."""
        return np.array([self.seconds_of(text) for text in trace.signatures], np.float64)[trace.op_signatures]

    def module_seconds(self, trace: Trace) -> dict[str, float]:
        """Return the seconds of a step's operators by the module that calls them itself, by FQN."""
        found: dict[str, float] = defaultdict(float)
        for op, seconds in zip(trace.ops, (trace.repeats * self.op_seconds(trace)).tolist(), strict=True):
            found[trace.fqn_of(op.call)] += seconds
        return found

    def op_workspaces(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Return the bytes that each operator of a trace allocates beyond its outputs."""
        return np.array([self.of(text).workspace_bytes for text in trace.signatures], np.int64)[trace.op_signatures]


_UNKNOWN = OpCost(0.0, 0, False)
_LIBRARY = '{"op":"aten.'


_BLOCK = 128  # queries and keys of the blocks that fused attention kernels skip
_CAUSAL: dict[str, int] = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_efficient_attention_forward": 9,
    "_efficient_attention_backward": 14,
}
"""Fused attention operators, and the position of is_causal (or custom_mask_type) in their schema."""
_CONVOLUTION_BACKWARD = ("convolution_backward", "convolution_backward_overrideable")
_TOKENS_FIRST = ("_flash_attention_", "_efficient_attention_")  # [batch, tokens, heads, head dim]

TF32 = "tf32"
Matmul = Literal["highest", "high"]
"""Values of `torch.set_float32_matmul_precision`: float32 matrix products without and with TF32."""


class Flops(msgspec.Struct, frozen=True, array_like=True):
    """Operations of one call, as the module's docstring defines them."""

    model: int
    hardware: int


@functools.lru_cache(maxsize=65536)
def call_flops(name: str, signature: str, work: Work) -> Flops:
    """Return the operations of a call.

    Args:
        work: Its work, whose count is taken for all but fused attention, recurrent layers and the backward pass of
            convolutions.
    """
    base = base_name(name)
    if is_kernel(signature):  # a library's, of one operator, where it is none that the compiler generates
        signature = members_of(signature)[-1] if members_of(signature) else ""
    if base in _CAUSAL:
        shape = attention_shape(name, arguments(signature))
        if shape is not None:
            return _attention_flops(shape, "backward" in base)
    if operator_class(name) == RECURRENT and "cell" not in base:
        count = _recurrent_flops(arguments(signature)) * (2 if "backward" in base else 1)
        return Flops(count, count)
    if base in _CONVOLUTION_BACKWARD and work.flops:
        twice = _convolution_backward_flops(arguments(signature), work.flops)
        return Flops(twice, twice)
    return Flops(work.flops, work.flops)


class AttentionShape(msgspec.Struct, frozen=True):
    """The sizes of a fused attention call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    causal: bool
    dtype: str


def attention_shape(name: str, given: Arguments) -> AttentionShape | None:
    """Return the sizes of a fused attention call; None for unknown arguments."""
    base = base_name(name)
    first = 1 if "backward" in base else 0
    q, k, v = (given.get(first + i, "") for i in range(3))
    if not all(isinstance(t, Tensor) and len(t.shape) == 4 for t in (q, k, v)):
        return None
    heads, tokens = (2, 1) if base.startswith(_TOKENS_FIRST) else (1, 2)
    causal = bool(given.get(_CAUSAL[base], "is_causal", given.named.get("custom_mask_type", False)))
    counts = (q.shape[heads], k.shape[heads], q.shape[tokens], k.shape[tokens])
    return AttentionShape(q.shape[0], *counts, q.shape[3], v.shape[3], causal, q.dtype)


def _attention_flops(shape: AttentionShape, backward: bool) -> Flops:
    scores = shape.batch * shape.heads * shape.queries * shape.keys
    forward = 2 * scores * (shape.dim + shape.value_dim)
    again = 2 * scores * shape.dim if backward else 0
    model, visible = 2 * forward if backward else forward, 1.0
    if shape.causal:  # the share of the blocks of the score matrix that the kernel visits
        rows, columns = math.ceil(shape.queries / _BLOCK), math.ceil(shape.keys / _BLOCK)
        visible = sum(min(row + 1, columns) for row in range(rows)) / max(1, rows * columns)
    return Flops(model, int((model + again) * visible))


def _recurrent_flops(given: Arguments) -> int:
    """Count the products of every token (the first argument, features last) with every matrix of weights."""
    if len(given.values) < 3 or not isinstance(given.values[0], Tensor):
        return 0
    tokens = given.values[0].elements // max(1, given.values[0].shape[-1])
    weights = given.values[1] if isinstance(given.values[1], list) else given.values[1:3]  # cuDNN's list, oneDNN's two
    return 2 * tokens * sum(t.elements for t in weights if isinstance(t, Tensor) and len(t.shape) == 2)


def _convolution_backward_flops(given: Arguments, counted: int) -> int:
    """Return twice the forward product, or once where one gradient is asked for; torch's count for unknown arguments.

    torch's count leaves `groups` out of the weight's gradient.
    """
    gradient, x, weight = (given.get(i, "") for i in range(3))
    if not isinstance(gradient, Tensor) or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return counted
    mask = given.get(10, "output_mask", [True, True])
    gradients = sum(bool(wanted) for wanted in mask[:2]) if isinstance(mask, list) else 2
    swept = x if given.get(7, "transposed", False) is True else gradient
    return gradients * 2 * swept.elements * weight.elements // max(1, weight.shape[0])


def runs_in_tf32(device: Device, dtype: str, kind: str, matmul: Matmul = "highest") -> bool:
    """Tell whether operators of a class run in TF32 on a device, by PyTorch's defaults and `matmul`."""
    has_units = device.vendor == "nvidia" and bool(device.matrix_flops.get(TF32))
    return (
        dtype == "float32"
        and has_units
        and (kind in (CONVOLUTIONS, RECURRENT) or matmul == "high" and kind != ATTENTION)
    )


def peak_flops(device: Device, dtype: str, kind: str, matmul: Matmul = "highest") -> float:
    """Return the device's peak rate for operators of a class, in operations per second; 0 if unknown.

    16-bit floats use matrix units where the device has them for that dtype, and float32 arithmetic elsewhere. float32
    uses TF32 by PyTorch's defaults: cuDNN's convolutions and recurrent layers from compute capability 8.0 on
    (`torch.backends.cudnn.allow_tf32`), matrix products only with `matmul="high"`.
    """
    matrix, vector = device.matrix_flops, device.vector_flops
    single = vector.get("float32", 0.0)
    if dtype != "float32":
        return matrix.get(dtype) or max(vector.get(dtype, 0.0), single if dtype != "float64" else 0.0)
    single = max(single, matrix.get("float32", 0.0))
    if device.vendor != "nvidia":
        return single
    reduced = matrix.get(TF32, 0.0)
    if runs_in_tf32(device, dtype, kind, matmul):
        return max(single, reduced)
    if kind == ATTENTION:  # CUTLASS's memory-efficient kernels make a float32 product of three in TF32
        return max(single, reduced / 3)
    return single


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

    Utilisation follows Chowdhery et al. 2022 (PaLM, appendix B): model operations count attention in
    full, causal or not, and no recomputation; hardware operations are those of the kernels.

    Args:
        trace: The step as it runs, recomputation included.
        step_seconds: Predicted time of the step; None to add up its operators.
        tokens_per_sample: Tokens in a sample; None without tokens.
        matmul: Whether float32 products may use TF32.
    """
    times = trace.repeats
    total: dict[str, float] = defaultdict(float)
    for op, of_op in zip(trace.ops, (times * costs.op_seconds(trace)).tolist(), strict=True):
        total[OPTIMIZER if op.phase == "optimizer" else operator_class(op.name)] += of_op
    by_class = dict(sorted(total.items(), key=lambda item: -item[1]))
    seconds = step_seconds if step_seconds is not None else sum(by_class.values())
    model = hardware = 0
    by_kind: dict[tuple[str, str], int] = defaultdict(int)
    for op, often in zip(trace.ops, times, strict=True):
        kind = operator_class(op.name)
        if op.phase == "optimizer" or kind not in _COUNTED:
            continue
        work = trace.works[op.signature]
        count = call_flops(op.name, trace.signatures[op.signature], work)
        hardware += int(often * count.hardware)
        if op.phase != "recompute":
            model += int(often * count.model)
            by_kind[work.dtype, kind] += int(often * count.model)
    dtype, kind = max(by_kind, key=lambda k: by_kind[k], default=("float32", MATRIX))
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

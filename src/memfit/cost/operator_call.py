"""A call of an operator on a device: its arguments, its kernels' time and memory traffic, and its workspace.

[Times] By the roofline model (`memfit.cost.accelerator_costs`) with what each class of operator attains of the device's
rates (`efficiency.toml`, with sources). `benchmarks/roofline.py` fits the form to this CPU.

[Workspaces] They are memory on a GPU that fake tensors don't show, one function for each operator. Sources are files of
PyTorch 2.13 (`aten/src/ATen/native/...`, shortened to their names). Sizes are as requested; the allocator rounds them.
Sizes that no source fixes (cuDNN's choice of algorithm) are upper bounds or estimates, and named so.
docs/results/published.md holds them against other people's measurements.

[What a context holds] A process holds memory outside of the allocator: the driver's context and the kernels that are
loaded. A card's `context_bytes` is of processes that load a kernel when it is first launched. That is how CUDA does it
since 11.7 where `CUDA_MODULE_LOADING=LAZY` is set before the driver starts, and by default since 12.2 (NVIDIA, *CUDA
Programming Guide*, "Lazy Loading"). PyTorch sets it since 1.13 when it starts CUDA, which is too late where a script
has asked `torch.cuda.is_available()` before (pytorch/pytorch issue 113326): with drivers older than CUDA 12.2 such a
process holds every kernel of its libraries. Neither is known of a step, so that `kernels_bytes` is the upper end.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from typing import Any

import msgspec

from memfit.ir import (
    ATTENTION,
    CONVOLUTIONS,
    COPIES,
    COPY_IN,
    COPY_OUT,
    ITEM_BYTES,
    MATRIX,
    RECURRENT,
    VIEWS,
    Arguments,
    AttentionShape,
    Device,
    Matmul,
    Tensor,
    Trace,
    Work,
    arguments,
    attention_shape,
    base_name,
    call_flops,
    operator_class,
    peak_flops,
)

_OVERWRITES = frozenset(
    "copy_ zero_ fill_ bernoulli_ uniform_ normal_ exponential_ random_ _foreach_copy_ _foreach_zero_ cauchy_ "
    "geometric_ log_normal_ chunk_cat split_with_sizes_copy".split()
)
_READS_TWICE = frozenset(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update "
    "native_group_norm native_batch_norm_backward batch_norm_backward native_group_norm_backward "
    "native_layer_norm_backward _fused_rms_norm_backward".split()
)
"""Kernels that read their input once for the statistics or the parameters' gradients, and once more."""
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "_unsafe_index"})
_SOFTMAX = frozenset("_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data".split())
_BLOCKS = 2  # blocks of 1024 threads on a multiprocessor
_SECTOR_BYTES = 32  # the least that a GPU reads at once
_LOAD_BYTES = 16  # of a thread at once
_ARITHMETIC = (MATRIX, CONVOLUTIONS, RECURRENT, ATTENTION)


class _UnknownArgument(Exception):
    """An argument that is not there, or not of the kind that an operator's rule knows."""


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
        """Return the time of a call, by its operations, its memory traffic, and its narrowest dimension."""
        arithmetic = flops / self.flops_per_second * (1 + self.half_width / width)
        return max(arithmetic, nbytes / self.bytes_per_second) + self.fixed_seconds


@functools.cache
def figures() -> dict[str, Any]:
    """Return `efficiency.toml`: the attained shares of the peak rates, by class of operator, with sources."""
    return tomllib.loads(resources.files("memfit.cost").joinpath("efficiency.toml").read_text("utf-8"))


class OperatorCall(msgspec.Struct, frozen=True, dict=True):
    """A call of an operator on a device.

    Attributes:
        name: The operator, with its overload.
        signature: Its arguments, as the trace has them.
        matmul: Whether products of float32 may run as TF32 ("high").
    """

    name: str
    signature: str
    work: Work
    device: Device
    matmul: Matmul = "highest"

    @functools.cached_property
    def base(self) -> str:
        """The operator's name without namespace and overload."""
        return base_name(self.name)

    @functools.cached_property
    def kind(self) -> str:
        """The operator's class."""
        return operator_class(self.name)

    @functools.cached_property
    def given(self) -> Arguments:
        """The arguments."""
        return arguments(self.signature)

    def tensor(self, position: int, name: str = "") -> Tensor:
        """Return a tensor among the arguments; raise `_UnknownArgument` where it is none."""
        found = self.given.get(position, name)
        if not isinstance(found, Tensor):
            raise _UnknownArgument
        return found

    def integers(self, *positions: int) -> list[int]:
        """Return integers among the arguments; raise `_UnknownArgument` where one is none."""
        found = [self.given.get(position, "") for position in positions]
        if not all(isinstance(value, int) for value in found):
            raise _UnknownArgument
        return found

    @property
    def attention(self) -> AttentionShape:
        """The sizes of a fused attention; `_UnknownArgument` is raised where they are not known."""
        shape = attention_shape(self.name, self.given)
        if shape is None:
            raise _UnknownArgument
        return shape

    @functools.cached_property
    def is_backward(self) -> bool:
        return "backward" in self.base

    @functools.cached_property
    def flops(self) -> int:
        """The hardware operations."""
        return call_flops(self.name, self.signature, self.work).hardware

    @property
    def runs_kernel(self) -> bool:
        """Whether it runs a kernel on the device; allocations don't, though their outputs are new."""
        return self.work.kernel and self.kind != VIEWS

    @property
    def peak_flops(self) -> float:
        """The device's peak rate for operators of this class."""
        return peak_flops(self.device, self.work.dtype, self.kind, self.matmul)

    @property
    def copied_bytes(self) -> int | None:
        """The bytes of a copy between the device and the host; None for other calls."""
        if self.name not in (COPY_IN, COPY_OUT):
            return None
        return max((t.nbytes for t in self.given.tensors), default=0)

    @property
    def weight(self) -> Tensor | None:
        """The weight of a convolution; None for unknown arguments."""
        weight = self.given.get(2 if self.is_backward else 1, "weight")
        return weight if isinstance(weight, Tensor) else None

    @property
    def groups(self) -> int:
        """The groups of a convolution."""
        groups = self.given.get(9 if self.is_backward else 8, "groups", 1)
        return groups if isinstance(groups, int) else 1

    @property
    def is_depthwise(self) -> bool:
        """Whether it is a convolution with one input channel for each group: its kernels use no matrix units."""
        return self.weight is not None and self.groups > 1 and self.weight.shape[1] == 1

    @functools.cached_property
    def factors(self) -> list[Tensor]:
        """The last two matrices among the arguments: the factors of a product, without biases and scales."""
        return [t for t in self.given.tensors if len(t.shape) > 1][-2:]

    @property
    def narrowest_dimension(self) -> float:
        """The narrowest dimension of a product, or the fewer channels of a convolution; infinite for others.

        It matters since kernels compute whole tiles, however little of them is used.
        """
        if self.kind == CONVOLUTIONS:
            weight = self.weight
            if weight is None or self.is_depthwise:
                return math.inf  # kernels of one channel compute no tiles
            return max(1, min(weight.shape[0] // self.groups, weight.shape[1]))
        if self.kind != MATRIX:
            return math.inf
        factors = self.factors
        return max(1, min(min(t.shape[-2:]) for t in factors)) if len(factors) == 2 else math.inf

    @property
    def traffic_bytes(self) -> int:
        """The bytes that are read and written; kernels don't read all their arguments exactly once."""
        base, work = self.base, self.work
        indices_bytes = sum(t.nbytes for t in self.given.tensors if t.dtype in ("int64", "int32"))
        read_bytes = work.read_bytes
        if base in _OVERWRITES or self.name.endswith(".out"):  # the written argument is not read
            read_bytes = max(0, work.read_bytes - work.write_bytes)
        elif base in _READS_TWICE:
            read_bytes = 2 * work.read_bytes
        elif base in _GATHERS:  # the looked-up rows, not the whole table
            read_bytes = min(work.read_bytes, work.write_bytes + indices_bytes)
        elif base in ("nll_loss_backward", "nll_loss2d_backward"):  # of the scores the shape alone
            read_bytes = indices_bytes
        elif base in ("nll_loss_forward", "nll_loss2d_forward"):  # one score for each target
            read_bytes = min(work.read_bytes, indices_bytes + indices_bytes // 8 * _SECTOR_BYTES)
        elif base == "embedding_dense_backward":
            gradient = self.given.get(0, "grad_output")  # scattered rows are read and written once more
            read_bytes += 2 * gradient.nbytes if isinstance(gradient, Tensor) else 0
        return read_bytes + work.write_bytes

    @property
    def repeated_bytes(self) -> int:
        """The bytes that softmax's kernels read again, and those of its product of gradient and output.

        `SoftMax.cu`: rows of up to 1024 elements stay in registers. Longer ones are read once for the maximum, once for
        the sum and once for the result; in the backward pass the gradient once for the sum, once for the result. Rows
        that are in flight together may still be in the cache.
        """
        x = next(iter(self.given.tensors), None) if self.base in _SOFTMAX else None
        if x is None or not x.shape:
            return 0
        product = 3 * x.nbytes if self.base == "_softmax_backward_data" else 0
        length = x.shape[-1]
        in_flight = 2 * _BLOCKS * self.device.cores * length * x.nbytes // max(1, x.elements)  # read and written
        if length <= 1024 or in_flight <= self.device.cache_bytes:
            return product
        return product + x.nbytes * (1 if self.is_backward else 2)

    @property
    def layout_bytes(self) -> int:
        """The bytes that a convolution copies to and from channels-last: for one product forward, two backward."""
        if self.kind != CONVOLUTIONS or self.device.kind != "cuda" or not self.work.kernel:
            return 0
        return _layout_copies(self) * (2 if self.is_backward else 1) if _uses_matrix_units(self) else 0

    @property
    def workspace_bytes(self) -> int:
        """The workspace: the peak of the bytes that are allocated beyond the outputs.

        It is 0 for CPUs, whose operators are measured, and for unknown arguments.
        """
        rule = _RULES.get(self.base)
        if rule is None or self.device.kind != "cuda" or not self.work.kernel or not self.given.tensors:
            return 0
        try:
            return rule(self)
        except _UnknownArgument:
            return 0

    @property
    def attained_rates(self) -> AttainedRates:
        """The rates that a large call attains, and its fixed time."""
        work, device, shared = self.work, self.device, figures()["device"]
        flops_per_second, fixed = self._arithmetic_rate(), float(shared["kernel_seconds"])
        computes_tiles = self.kind in (MATRIX, CONVOLUTIONS)
        if computes_tiles and self.flops:
            item_bytes = ITEM_BYTES.get(work.dtype, 1)
            depth = min(self.flops * item_bytes / (2 * max(1, work.write_bytes)), shared["block_depth"])
            # On average the last wave of thread blocks idles for half of a block's share of the product.
            block = 2 * min(shared["block_elements"], work.write_bytes / item_bytes) * depth
            fixed += 0.5 * block * device.cores / flops_per_second
        traffic = figures().get(self.kind, figures()["other"])["traffic"]
        half_width = float(shared["half_width"]) if computes_tiles else 0.0
        return AttainedRates(flops_per_second, traffic * device.bandwidth_bytes_per_second, fixed, half_width)

    def _arithmetic_rate(self) -> float:
        kind, dtype, device = self.kind, self.work.dtype, self.device
        vector = device.vector_flops["float32"]
        if kind not in _ARITHMETIC:
            return vector
        own = figures()[kind]
        if kind == CONVOLUTIONS and self.is_depthwise:
            return float(own["vector"] * vector)
        peak = self.peak_flops or vector
        if peak <= device.vector_flops.get(dtype, vector):
            return float(own["vector"] * peak)
        share = own["matrix"]
        if kind == ATTENTION:  # of a fused kernel on this generation of GPUs
            kernel = next((k for k in ("flash", "efficient", "cudnn") if k in self.name), None)
            if kernel is not None:
                table = own[kernel]
                if device.vendor == "nvidia" and device.capability is not None:
                    table = table.get(str(device.capability[0]), table)
                share = table["backward" if self.is_backward else "forward"]
        else:
            share = own.get("tf32" if dtype == "float32" else dtype, share)
            # Wide loads need rows of both factors that begin at multiples of 16 bytes.
            steps = ((t.dtype, step) for t in self.factors for step in t.strides[-2:] if step > 1)
            if kind == MATRIX and any(step * ITEM_BYTES.get(dtype, 1) % _LOAD_BYTES for dtype, step in steps):
                share *= own["unaligned"]
        # Where the card halves the rate of its matrix units, what else limits a kernel (loads, addresses,
        # synchronisation) is the same as on a card with the full rate, so that it reaches as much of that rate, up to a
        # ceiling.
        if device.float32_accumulation_share is not None:
            ceiling = float(figures()["device"]["halved_ceiling"])
            share = max(share, min(share / device.float32_accumulation_share, ceiling))
        return float(peak * share)

    @property
    def kernel_seconds(self) -> float:
        """The time of its kernels, by the published and estimated efficiencies."""
        if not self.runs_kernel:
            return 0.0
        device, shared = self.device, figures()["device"]
        nbytes: float = self.traffic_bytes + self.repeated_bytes
        if self.work.read_bytes + self.work.write_bytes <= device.cache_bytes:
            nbytes = nbytes / shared["cache_speedup"]
        copied = 2 * self.layout_bytes  # read and written, by kernels of their own
        copies = copied / float(figures()[COPIES]["traffic"] * device.bandwidth_bytes_per_second)
        seconds = self.attained_rates.seconds(self.flops, nbytes, self.narrowest_dimension) + copies
        if self.base not in ("nll_loss_forward", "nll_loss_backward") or not self.given.tensors:
            return seconds
        # `NLLLoss.cu`, nll_loss_forward_reduce_cuda_kernel_2d and its backward kernel: a single block of 32 threads
        # reduces all targets, each by its class, which is read first: reads that wait for one another.
        first = 2 if self.is_backward else 1
        target, reduction = self.given.get(first, "target"), self.given.get(first + 2, "reduction", 1)
        if not isinstance(target, Tensor) or reduction == 0:
            return seconds
        return seconds + float(shared["chained_read_seconds"]) * math.ceil(target.elements / 32)

    @property
    def floor_seconds(self) -> float:
        """The least time from this operator to the next in eager mode, whatever its kernel's time."""
        launch_seconds = self.device.launch_seconds
        if not self.runs_kernel:
            return float(figures()["device"]["view_share"] * launch_seconds)
        if self.kind != RECURRENT:
            return launch_seconds
        # A layer's time steps wait for one another.
        first, steps = self.given.get(0, "input"), 1
        if isinstance(first, Tensor) and len(first.shape) > 2:
            layers = self.given.get(9, "num_layers") if "_cudnn_rnn" in self.signature else 1
            steps = first.shape[0] * (layers if isinstance(layers, int) else 1)
        step_seconds = float(figures()["device"]["recurrent_step_seconds"])
        return max(launch_seconds, step_seconds * steps * (2 if self.is_backward else 1))


def distinct_calls(traces: Iterable[Trace], device: Device, matmul: Matmul = "highest") -> Iterator[OperatorCall]:
    """Yield the calls of some traces on a device, each signature once."""
    seen: set[str] = set()
    for trace in traces:
        for op in trace.ops:
            if (text := trace.signatures[op.signature]) not in seen:
                seen.add(text)
                yield OperatorCall(op.name, text, trace.works[op.signature], device, matmul)


KERNELS_BYTES = 1024 * 2**20
"""Every kernel of PyTorch and cuBLAS: 921 MiB beyond the card's `context_bytes` on an A100 (GPUMemNet's smallest
multilayer perceptrons: 1443 MiB, of which 22 MiB are reserved), 993 MiB on a V100 (transformers: 1343 MiB after a
tensor of one element)."""
CUDNN_KERNELS_BYTES = 283 * 2**20
"""Those of cuDNN, on an A100: 13 of timm's models at batch 8 hold 1704 MiB (the median; 1569 to 1790) beyond their
predicted reserved bytes, perceptrons on the same machine 1421 MiB (GPUMemNet, fake_tensor.xlsx, mlp_data_step1.csv)."""
_FLOAT, _LONG = 4, 8


def resident_bytes(trace: Trace, device: Device) -> int:
    """Return the bytes of cuBLAS workspaces that stay in the allocator after a step."""
    # A workspace for each thread that multiplies matrices: the user's, and autograd's for the device, which runs the
    # backward pass and recomputations (`CublasHandlePool.cpp`). cublasLt shares them.
    backward = ("backward", "recompute")
    threads = {op.phase in backward for op in trace.ops if operator_class(op.name) == MATRIX}
    return len(threads) * device.cublas_workspace_bytes


def kernels_bytes(trace: Trace) -> int:
    """Return the bytes of all kernels of the libraries that a step needs: Note [What a context holds].

    It never launches most of them.
    """
    convolves = any(operator_class(op.name) == CONVOLUTIONS for op in trace.ops)
    return KERNELS_BYTES + (CUDNN_KERNELS_BYTES if convolves else 0)


Rule = Callable[[OperatorCall], int]
_RULES: dict[str, Rule] = {
    # `SoftMax.cu`, softmax_backward_cuda_out: the product of gradient and output, in its own tensor.
    "_softmax_backward_data": lambda call: max(tensor.nbytes for tensor in call.given.tensors),
    **dict.fromkeys(("sort", "argsort"), lambda call: _sort_bytes(call.given.tensors[0])),  # `Sort.cpp`
}
"""The workspaces of operators on a GPU, by their names: Note [Workspaces]."""


def _of(*names: str) -> Callable[[Rule], Rule]:
    """Have a function tell the workspace of operators."""

    def known(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return known


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@_of("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
def _flash_backward(call: OperatorCall) -> int:
    """`flash_api.cpp`, mha_bwd: dq_accum, softmax_d, and dk and dv of every query head under grouped queries.

    On ROCm AOTriton keeps a float32 for each row (`attention_backward.cu`).
    """
    shape = call.attention
    if call.device.vendor == "amd":
        return _FLOAT * shape.batch * shape.heads * shape.queries
    rows = shape.batch * shape.heads * _rounded_up(shape.queries, 128)
    head = _rounded_up(shape.dim, 32 if shape.dim <= 128 else 64)
    return _FLOAT * rows * head + _FLOAT * rows + _expanded_gradients(shape)


def _expanded_gradients(shape: AttentionShape) -> int:
    if shape.heads == shape.key_heads:
        return 0
    return 2 * shape.batch * shape.keys * shape.heads * shape.dim * ITEM_BYTES.get(shape.dtype, 1)


@_of("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_attention_backward(call: OperatorCall) -> int:
    """cudnn-frontend, scaled_dot_product_flash_attention.h: softmax_sum, dQ_accum, and dK and dV of every query head.

    A bound: from Hopper on it may take a smaller workspace instead.
    """
    shape = call.attention
    return _FLOAT * shape.batch * shape.heads * shape.queries * (1 + shape.dim) + _expanded_gradients(shape)


@_of("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
def _efficient_forward(call: OperatorCall) -> int:
    """`kernel_forward.h`: the output in float32 where heads are wider than a block of keys (128)."""
    shape = call.attention
    if shape.dtype == "float32" or shape.value_dim <= 128:
        return 0
    return _FLOAT * shape.batch * shape.heads * shape.queries * shape.value_dim


@_of("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
def _efficient_backward(call: OperatorCall) -> int:
    """`kernel_backward.h`: delta and Params::workspace_size, with the tiles that `cutlassB.h` picks; keys aren't split.

    For float32, delta is made by operators: the product of grad_out and out lives with it before the kernel runs.
    """
    shape = call.attention
    heads, half, widest = shape.batch * shape.heads, shape.dtype != "float32", max(shape.dim, shape.value_dim)
    queries = 64 if widest <= 64 else 128  # of a block, and its keys
    keys = 128 if half and 64 < widest <= 128 else 64
    delta = _FLOAT * heads * shape.queries
    # GradQTempStorage: a float32 tile and 16 bytes each.
    of_head = -(-shape.queries // queries) * -(-shape.dim // keys) * (16 + _FLOAT * queries * keys)
    if half and widest > queries:  # registers can't hold the gradients of keys and values
        splits = max(1, min(-(-shape.keys // keys), 200 // max(1, heads)))
        of_head += _FLOAT * splits * keys * (_rounded_up(shape.dim, queries) + _rounded_up(shape.value_dim, queries))
    product = 0 if half else _FLOAT * heads * shape.queries * shape.value_dim
    return delta + max(heads * of_head, product + delta)


@_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: OperatorCall) -> int:
    """`layer_norm_kernel.cu`, GammaBetaBackward: partial sums of both gradients where rows are many and short."""
    x, weight = call.tensor(1, "input"), call.tensor(5 if "layer" in call.base else 4, "weight")
    columns = max(1, weight.elements)
    rows, blocks = x.elements // columns, -(-columns // 32)
    if rows <= 64 * 1024 or columns // 32 >= call.device.cores // 2:
        return 0
    partials = min(32 * 1024 // blocks, -(-rows // 32)) * weight.nbytes
    return partials * (2 if "layer" in call.base else 1)


@_of("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit")
@_of("cudnn_batch_norm", "cudnn_batch_norm_backward")
def _batch_norm(call: OperatorCall) -> int:
    """`Normalization.cuh`: staging of channels-last statistics, for at most 128 blocks of rows (MAX_H_BLOCK)."""
    x = call.tensor(0, "input")
    return (2 if call.is_backward else 4) * x.shape[1] * 128 * _FLOAT if x.channels_last else 0


@_of("native_group_norm", "native_group_norm_backward")
def _group_norm(call: OperatorCall) -> int:
    """`group_norm_kernel.cu`: per sample and channel a and b; in the backward pass ds, db, c1, and c2, c3 by group."""
    first = 5 if call.is_backward else 3
    samples, channels, groups = call.integers(first, first + 1, first + 3)
    return _FLOAT * samples * (3 * channels + 2 * groups if call.is_backward else 2 * channels)


@_of("embedding_dense_backward")
def _embedding_backward(call: OperatorCall) -> int:
    """`Embedding.cu` and `EmbeddingBackwardKernel.cu`: from 3073 indices on they are sorted and summed by segment."""
    gradient, indices, (rows,) = call.tensor(0), call.tensor(1), call.integers(2)
    count = indices.elements
    if count <= 3072:
        return 0
    segments = min(count, rows)
    partials = count // 10 + segments
    summed = indices.nbytes + (2 * segments + partials) * _LONG + partials * gradient.shape[-1] * _FLOAT
    return 2 * indices.nbytes + max(_sort_bytes(indices), summed)


def _sort_bytes(keys: Tensor) -> int:
    """CUB's DeviceRadixSort: second buffers for keys and for 8-byte values, and the values to begin with."""
    return keys.nbytes + 2 * keys.elements * _LONG


@_of("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: OperatorCall) -> int:
    """`Indexing.cu`, index_put_with_sort: linear and sorted indices, their order, and the sort."""
    call.tensor(2, "values")
    indices = [t for t in call.given.tensors if t.dtype in ("int64", "int32")]
    if not indices or not call.given.get(3, "accumulate", False):
        return 0
    linear = Tensor("int64", max((t.shape for t in indices), key=math.prod), ())
    return 3 * linear.nbytes + _sort_bytes(linear)


@_of("_foreach_norm")
def _foreach_norm(call: OperatorCall) -> int:
    """`ForeachReduceOp.cu`: a partial norm for each chunk of 65,536 elements, as many for all as the largest has."""
    chunks = [-(-t.elements // 65536) for t in call.given.tensors]
    return _FLOAT * len(chunks) * max(chunks)


@_of("sum", "mean", "amax", "amin", "linalg_vector_norm", "var_mean", "any", "all")
def _reduction(call: OperatorCall) -> int:
    """`Reduce.cuh`: staging where several blocks reduce one output: at most 128 partials for each of 4 a core."""
    if call.given.tensors[0].elements < 1 << 16 or call.work.write_bytes * 64 > call.work.read_bytes:
        return 0
    return call.device.cores * 4 * 128 * _FLOAT


@_of("_cudnn_rnn", "_cudnn_rnn_backward")
def _recurrent(call: OperatorCall) -> int:
    """An upper bound of cuDNN's cudnnGetRNNTempSpaceSizes: the gates of every time step of one layer."""
    x, weights = call.tensor(0, "input"), call.given.get(1, "weight")
    rows = [t.shape[0] for t in weights if isinstance(t, Tensor)] if isinstance(weights, list) else []
    return x.elements // max(1, x.shape[-1]) * max(rows, default=0) * ITEM_BYTES.get(x.dtype, 1)


@_of("convolution", "cudnn_convolution", "convolution_backward")
def _convolution(call: OperatorCall) -> int:
    """An estimate of cuDNN's workspace: copies of operands, or the float32 accumulator of the weight's gradient.

    cuDNN may request more: only `CUDNN_CONV_WSCAP_DBG` limits it.
    """
    if call.weight is None or not _uses_matrix_units(call):
        return 0
    if copies := _layout_copies(call):
        return copies * (_TRANSFORMED_COPIES if call.work.dtype == "float32" else 1)
    return _FLOAT * call.weight.elements if call.is_backward else 0


_TRANSFORMED_COPIES = 3
"""How many copies of its operands a convolution of several pixels takes in TF32.

cuDNN documents neither which algorithm it takes nor its workspace. Winograd's alone holds 36/16 of input and output for
tiles of 4 x 4 (Lavin, Gray, 2015, *Fast Algorithms for Convolutional Neural Networks*), beside the copies of layout.
The number was fitted: of 1 to 5 it has the least error over 39 steps of 13 of timm's models on an A100 (GPUMemNet,
fake_tensor.xlsx), of which none is a row of docs/results/published.md. That page has the errors.
"""


def _uses_matrix_units(call: OperatorCall) -> bool:
    """Tell whether cuDNN computes a convolution on matrix units. Depthwise kernels are PyTorch's own and don't."""
    rates = call.device.vector_flops
    vector = rates.get(call.work.dtype, rates.get("float32", 0.0))
    return call.weight is not None and call.weight.shape[1] != 1 and call.peak_flops > vector


def _layout_copies(call: OperatorCall) -> int:
    """Copies of other layouts to channels-last, which matrix units need where a kernel has several pixels.

    Of the forward product and the gradients of input and weight, which run in turn, the one that copies most. Kernels
    of one pixel are products of matrices, which take either layout: MobileNets show no copies.
    """
    x, weight = call.given.get(1 if call.is_backward else 0, "input"), call.weight
    if not isinstance(x, Tensor) or weight is None:
        return 0
    if x.channels_last or weight.channels_last or math.prod(weight.shape[2:]) == 1:
        return 0
    gradient = call.given.get(0, "grad_output")
    other = gradient.nbytes if call.is_backward and isinstance(gradient, Tensor) else call.work.write_bytes
    return x.nbytes + weight.nbytes + other

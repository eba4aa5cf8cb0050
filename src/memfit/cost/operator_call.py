"""A call of an operator on a device: its arguments, the memory traffic of its kernels, and its workspace.

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
from collections.abc import Callable, Iterable, Iterator

import msgspec

from memfit.ir import (
    CONVOLUTIONS,
    COPY_IN,
    COPY_OUT,
    ITEM_BYTES,
    MATRIX,
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

_OVERWRITES = {
    *("copy_", "zero_", "fill_", "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "_foreach_copy_"),
    *("_foreach_zero_", "cauchy_", "geometric_", "log_normal_", "chunk_cat", "split_with_sizes_copy"),
}
_READS_TWICE = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "native_group_norm",
    "native_batch_norm_backward",
    "batch_norm_backward",
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "_fused_rms_norm_backward",
}
"""Kernels that read their input once for the statistics or the parameters' gradients, and once more."""
_GATHERS = {"embedding", "index", "index_select", "gather", "_unsafe_index"}
_BLOCKS = 2  # blocks of 1024 threads on a multiprocessor
_SECTOR_BYTES = 32  # the least that a GPU reads at once


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
    def copies(self) -> bool:
        """Whether it is a copy between the device and the host."""
        return self.name in (COPY_IN, COPY_OUT)

    @property
    def largest_bytes(self) -> int:
        """The bytes of its largest argument."""
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


def distinct_calls(traces: Iterable[Trace], device: Device, matmul: Matmul = "highest") -> Iterator[OperatorCall]:
    """Yield the calls of some traces on a device, each signature once."""
    seen: set[str] = set()
    for trace in traces:
        for op in trace.ops:
            if (text := trace.signatures[op.signature]) not in seen:
                seen.add(text)
                yield OperatorCall(op.name, text, trace.works[op.signature], device, matmul)


def traffic_bytes(call: OperatorCall) -> int:
    """Return the bytes read and written by a call; kernels don't read all their arguments exactly once."""
    base, work, indices_bytes = call.base, call.work, _integer_bytes(call)
    read_bytes = work.read_bytes
    if base in _OVERWRITES or call.name.endswith(".out"):  # the written argument is not read
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
        gradient = call.given.get(0, "grad_output")  # scattered rows are read and written once more
        read_bytes += 2 * gradient.nbytes if isinstance(gradient, Tensor) else 0
    return read_bytes + work.write_bytes


def repeated_bytes(call: OperatorCall) -> int:
    """Return the bytes that softmax's kernels read again, and those of its product of gradient and output.

    `SoftMax.cu`: rows of up to 1024 elements stay in registers. Longer ones are read once for the maximum, once for the
    sum and once for the result; in the backward pass the gradient once for the sum, once for the result. Rows that are
    in flight together may still be in the cache.
    """
    if call.base not in (
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
    ):
        return 0
    tensors = call.given.tensors
    if not tensors or not tensors[0].shape:
        return 0
    x = tensors[0]
    product = 3 * x.nbytes if call.base == "_softmax_backward_data" else 0
    length = x.shape[-1]
    in_flight = 2 * _BLOCKS * call.device.cores * length * x.nbytes // max(1, x.elements)  # read and written
    if length <= 1024 or in_flight <= call.device.cache_bytes:
        return product
    return product + x.nbytes * (1 if call.is_backward else 2)


def _integer_bytes(call: OperatorCall) -> int:
    return sum(t.nbytes for t in call.given.tensors if t.dtype in ("int64", "int32"))


KERNELS_BYTES = 1024 * 2**20
"""Every kernel of PyTorch and cuBLAS: 921 MiB beyond the card's `context_bytes` on an A100 (GPUMemNet's smallest
multilayer perceptrons: 1443 MiB, of which 22 MiB are reserved), 993 MiB on a V100 (transformers: 1343 MiB after a
tensor of one element)."""
CUDNN_KERNELS_BYTES = 283 * 2**20
"""Those of cuDNN, on an A100: 13 of timm's models at batch 8 hold 1704 MiB (the median; 1569 to 1790) beyond their
predicted reserved bytes, perceptrons on the same machine 1421 MiB (GPUMemNet, fake_tensor.xlsx, mlp_data_step1.csv)."""
_FLOAT, _LONG = 4, 8


def workspace_bytes(call: OperatorCall) -> int:
    """Return a call's workspace: the peak of the bytes that it allocates beyond its outputs.

    It is 0 for CPUs, whose operators are measured.
    """
    rule = _RULES.get(call.base)
    if rule is None or call.device.kind != "cuda" or not call.work.kernel:
        return 0
    return rule(call) if call.given.tensors else 0


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


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(call: OperatorCall) -> int:
    """`flash_api.cpp`, mha_bwd: dq_accum, softmax_d, and dk and dv of every query head under grouped queries.

    On ROCm AOTriton keeps a float32 for each row (`attention_backward.cu`).
    """
    shape = attention_shape(call.name, call.given)
    if shape is None:
        return 0
    rows = shape.batch * shape.heads * _rounded_up(shape.queries, 128)
    if call.device.vendor == "amd":
        return _FLOAT * shape.batch * shape.heads * shape.queries
    head = _rounded_up(shape.dim, 32 if shape.dim <= 128 else 64)
    return _FLOAT * rows * head + _FLOAT * rows + _expanded_gradients(shape)


def _expanded_gradients(shape: AttentionShape) -> int:
    if shape.heads == shape.key_heads:
        return 0
    return 2 * shape.batch * shape.keys * shape.heads * shape.dim * ITEM_BYTES.get(shape.dtype, 1)


def _cudnn_attention_backward(call: OperatorCall) -> int:
    """cudnn-frontend, scaled_dot_product_flash_attention.h: softmax_sum, dQ_accum, and dK and dV of every query head.

    A bound: from Hopper on it may take a smaller workspace instead.
    """
    shape = attention_shape(call.name, call.given)
    if shape is None:
        return 0
    rows = shape.batch * shape.heads * shape.queries
    return _FLOAT * rows * (1 + shape.dim) + _expanded_gradients(shape)


def _efficient_forward(call: OperatorCall) -> int:
    """`kernel_forward.h`: the output in float32 where heads are wider than a block of keys (128)."""
    shape = attention_shape(call.name, call.given)
    if shape is None or shape.dtype == "float32" or shape.value_dim <= 128:
        return 0
    return _FLOAT * shape.batch * shape.heads * shape.queries * shape.value_dim


def _efficient_backward(call: OperatorCall) -> int:
    """`kernel_backward.h`: delta and Params::workspace_size, with the tiles that `cutlassB.h` picks; keys aren't split.

    For float32, delta is made by operators: the product of grad_out and out lives with it before the kernel runs.
    """
    shape = attention_shape(call.name, call.given)
    if shape is None:
        return 0
    heads, half, widest = shape.batch * shape.heads, shape.dtype != "float32", max(shape.dim, shape.value_dim)
    queries = 64 if widest <= 64 else 128  # of a block, and its keys
    keys = 128 if half and 64 < widest <= 128 else 64
    delta = _FLOAT * heads * shape.queries
    # GradQTempStorage: a float32 tile and 16 bytes each.
    of_head = -(-shape.queries // queries) * -(-shape.dim // keys) * (16 + _FLOAT * queries * keys)
    if half and widest > queries:  # registers can't hold the gradients of keys and values
        splits = max(1, min(-(-shape.keys // keys), 200 // max(1, heads)))
        of_head += _FLOAT * splits * keys * (_rounded_up(shape.dim, queries) + _rounded_up(shape.value_dim, queries))
    workspace = heads * of_head
    product = 0 if half else _FLOAT * heads * shape.queries * shape.value_dim
    return delta + max(workspace, product + delta)


def _layer_norm_backward(call: OperatorCall) -> int:
    """`layer_norm_kernel.cu`, GammaBetaBackward: partial sums of both gradients where rows are many and short."""
    x = call.given.get(1, "input")
    weight = call.given.get(5 if "layer" in call.base else 4, "weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return 0
    columns = max(1, weight.elements)
    rows, blocks = x.elements // columns, -(-columns // 32)
    if rows <= 64 * 1024 or columns // 32 >= call.device.cores // 2:
        return 0
    partials = min(32 * 1024 // blocks, -(-rows // 32)) * weight.nbytes
    return partials * (2 if "layer" in call.base else 1)


def _batch_norm(call: OperatorCall) -> int:
    """`Normalization.cuh`: staging of channels-last statistics, for at most 128 blocks of rows (MAX_H_BLOCK)."""
    x = call.given.get(0, "input")
    if not isinstance(x, Tensor) or not x.channels_last:
        return 0
    return (2 if call.is_backward else 4) * x.shape[1] * 128 * _FLOAT


def _group_norm(call: OperatorCall) -> int:
    """`group_norm_kernel.cu`: per sample and channel a and b; in the backward pass ds, db, c1, and c2, c3 by group."""
    backward, first = call.is_backward, 5 if call.is_backward else 3
    samples, channels, _, groups = (call.given.get(first + i, "") for i in range(4))
    if not isinstance(samples, int) or not isinstance(channels, int) or not isinstance(groups, int):
        return 0
    return _FLOAT * samples * (3 * channels + 2 * groups if backward else 2 * channels)


def _embedding_backward(call: OperatorCall) -> int:
    """`Embedding.cu` and `EmbeddingBackwardKernel.cu`: from 3073 indices on they are sorted and summed by segment."""
    gradient, indices, rows = call.given.get(0, ""), call.given.get(1, ""), call.given.get(2, "")
    if not isinstance(gradient, Tensor) or not isinstance(indices, Tensor) or not isinstance(rows, int):
        return 0
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


def _index_put(call: OperatorCall) -> int:
    """`Indexing.cu`, index_put_with_sort: linear and sorted indices, their order, and the sort."""
    if not call.given.get(3, "accumulate", False):
        return 0
    values = call.given.get(2, "values")
    indices = [t for t in call.given.tensors if t.dtype in ("int64", "int32")]
    if not indices or not isinstance(values, Tensor):
        return 0
    linear = Tensor("int64", max((t.shape for t in indices), key=math.prod), ())
    return 3 * linear.nbytes + _sort_bytes(linear)


def _foreach_norm(call: OperatorCall) -> int:
    """`ForeachReduceOp.cu`: a partial norm for each chunk of 65,536 elements, as many for all as the largest has."""
    chunks = [-(-t.elements // 65536) for t in call.given.tensors]
    return _FLOAT * len(chunks) * max(chunks, default=0)


def _reduction(call: OperatorCall) -> int:
    """`Reduce.cuh`: staging where several blocks reduce one output: at most 128 partials for each of 4 a core."""
    tensors, work = call.given.tensors, call.work
    if not tensors or tensors[0].elements < 1 << 16 or work.write_bytes * 64 > work.read_bytes:
        return 0
    return call.device.cores * 4 * 128 * _FLOAT


def _recurrent(call: OperatorCall) -> int:
    """An upper bound of cuDNN's cudnnGetRNNTempSpaceSizes: the gates of every time step of one layer."""
    x, weights = call.given.get(0, "input"), call.given.get(1, "weight")
    matrices = [t for t in weights if isinstance(t, Tensor)] if isinstance(weights, list) else []
    if not isinstance(x, Tensor) or not matrices:
        return 0
    gates = max(t.shape[0] for t in matrices)
    return x.elements // max(1, x.shape[-1]) * gates * ITEM_BYTES.get(x.dtype, 1)


def _convolution(call: OperatorCall) -> int:
    """An estimate of cuDNN's workspace: copies of operands, or the float32 accumulator of the weight's gradient.

    cuDNN may request more: only `CUDNN_CONV_WSCAP_DBG` limits it.
    """
    weight = call.weight
    if weight is None or not _uses_matrix_units(call):
        return 0
    if copies := _layout_copies(call):
        return copies * (_TRANSFORMED_COPIES if call.work.dtype == "float32" else 1)
    return _FLOAT * weight.elements if call.is_backward else 0


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


def layout_bytes(call: OperatorCall) -> int:
    """Return the bytes that a convolution copies to and from channels-last: for one product forward, two backward."""
    if call.kind != CONVOLUTIONS or call.device.kind != "cuda" or not call.work.kernel or not _uses_matrix_units(call):
        return 0
    return _layout_copies(call) * (2 if call.is_backward else 1)


_RULES: dict[str, Callable[[OperatorCall], int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_efficient_attention_forward": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_backward": _efficient_backward,
    # `SoftMax.cu`, softmax_backward_cuda_out: the product of gradient and output, in its own tensor.
    "_softmax_backward_data": lambda call: max(tensor.nbytes for tensor in call.given.tensors),
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _layer_norm_backward,
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit", "cudnn_batch_norm", "cudnn_batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_norm),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("sort", "argsort"), lambda call: _sort_bytes(call.given.tensors[0])),  # `Sort.cpp`
    "_foreach_norm": _foreach_norm,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "linalg_vector_norm", "var_mean", "any", "all"), _reduction),
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), _recurrent),
    **dict.fromkeys(("convolution", "cudnn_convolution", "convolution_backward"), _convolution),
}

"""A call of an operator on a device: what it is given, and the memory traffic of its kernels."""

from __future__ import annotations

import functools

import msgspec

from memfit.ir.arguments import Arguments, Tensor, arguments
from memfit.ir.device import Device
from memfit.ir.flops import Matmul, base_name, call_flops, peak_flops
from memfit.ir.operator_classes import VIEWS, operator_class
from memfit.ir.trace import Work

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
_SHAPE_ONLY = {"nll_loss_backward", "nll_loss2d_backward"}
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
    def weight(self) -> Tensor | None:
        """The weight of a convolution; None for unknown arguments."""
        weight = self.given.get(2 if self.is_backward else 1, "weight")
        return weight if isinstance(weight, Tensor) else None

    @property
    def groups(self) -> int:
        """The groups of a convolution."""
        groups = self.given.get(9 if self.is_backward else 8, "groups", 1)
        return groups if isinstance(groups, int) else 1


def traffic_bytes(call: OperatorCall) -> int:
    """Return the bytes read and written by a call; kernels don't read all their arguments exactly once."""
    return _read_bytes(call) + call.work.write_bytes


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


def _read_bytes(call: OperatorCall) -> int:
    base, work = call.base, call.work
    if base in _OVERWRITES or call.name.endswith(".out"):  # the written argument is not read
        return max(0, work.read_bytes - work.write_bytes)
    if base in _READS_TWICE:
        return 2 * work.read_bytes
    if base in _GATHERS:  # the looked-up rows, not the whole table
        return min(work.read_bytes, work.write_bytes + _integer_bytes(call))
    if base in _SHAPE_ONLY:
        return _integer_bytes(call)
    if base in ("nll_loss_forward", "nll_loss2d_forward"):  # one score for each target
        targets = _integer_bytes(call)
        return min(work.read_bytes, targets + targets // 8 * _SECTOR_BYTES)
    if base == "embedding_dense_backward":
        gradient = call.given.get(0, "grad_output")  # scattered rows are read and written once more
        return work.read_bytes + (2 * gradient.nbytes if isinstance(gradient, Tensor) else 0)
    return work.read_bytes


def _integer_bytes(call: OperatorCall) -> int:
    return sum(t.nbytes for t in call.given.tensors if t.dtype in ("int64", "int32"))

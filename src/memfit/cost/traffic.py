"""Memory traffic of operators whose kernels don't read their arguments exactly once."""

from __future__ import annotations

from memfit.ir.arguments import Tensor, arguments
from memfit.ir.device import Device
from memfit.ir.flops import base_name
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


def traffic_bytes(name: str, signature: str, work: Work) -> int:
    """Return the bytes read and written by a call."""
    if name.endswith(".out"):  # nor is what they are given to write to read
        return max(0, work.read_bytes - work.write_bytes) + work.write_bytes
    return _read_bytes(base_name(name), signature, work) + work.write_bytes


def repeated_bytes(name: str, signature: str, device: Device) -> int:
    """Return the bytes that softmax's kernels read again, and those of its product of gradient and output.

    `SoftMax.cu`: rows of up to 1024 elements stay in registers. Longer ones are read once for the maximum, once for the
    sum and once for the result; in the backward pass the gradient once for the sum, once for the result. Rows that are
    in flight together may still be in the cache.
    """
    base = base_name(name)
    if base not in (
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
    ):
        return 0
    given = arguments(signature)
    if not given.tensors or not given.tensors[0].shape:
        return 0
    x = given.tensors[0]
    product = 3 * x.nbytes if base == "_softmax_backward_data" else 0
    length = x.shape[-1]
    in_flight = 2 * _BLOCKS * device.cores * length * x.nbytes // max(1, x.elements)  # read and written
    if length <= 1024 or in_flight <= device.cache_bytes:
        return product
    return product + x.nbytes * (1 if "backward" in base else 2)


def _read_bytes(base: str, signature: str, work: Work) -> int:
    if base in _OVERWRITES:  # the written argument is not read
        return max(0, work.read_bytes - work.write_bytes)
    if base in _READS_TWICE:
        return 2 * work.read_bytes
    if base in _GATHERS:  # the looked-up rows, not the whole table
        return min(work.read_bytes, work.write_bytes + _integer_bytes(signature))
    if base in _SHAPE_ONLY:
        return _integer_bytes(signature)
    if base in ("nll_loss_forward", "nll_loss2d_forward"):  # one score for each target
        targets = _integer_bytes(signature)
        return min(work.read_bytes, targets + targets // 8 * _SECTOR_BYTES)
    if base == "embedding_dense_backward":
        gradient = arguments(signature).get(0, "grad_output")  # scattered rows are read and written once more
        return work.read_bytes + (2 * gradient.nbytes if isinstance(gradient, Tensor) else 0)
    return work.read_bytes


def _integer_bytes(signature: str) -> int:
    return sum(t.nbytes for t in arguments(signature).tensors if t.dtype in ("int64", "int32"))

"""Operators by their names and signatures: arguments, classes, and collectives. No torch.

Collectives are what ranks send one another. On a GPU they run on one communicator, one after the other, beside the
computation:

1. A gather is waited for where its parameters are copied out.
2. A reduction of shards is waited for where the next one's gradients are copied in, and all before the update.
3. Sums of gradients (`DistributedDataParallel`) are waited for before the update; small ones, of losses and norms, at
   once.

On a CPU each is waited for at once.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, NamedTuple

import msgspec

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64", "double"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    "complex128": 16,
}
"""Bytes of an element by dtype; unlisted dtypes take one (bool, 8-bit integers and floats)."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor argument."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements, as if contiguous."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)

    @property
    def channels_last(self) -> bool:
        """Whether an image or volume is in channels-last layout."""
        return len(self.shape) > 3 and self.shape[1] > 1 and self.strides[1] == 1


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a call: tensors as `Tensor`, lists as lists, dtypes and devices by name."""

    values: list[Any]
    named: dict[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its place in the schema, or the default where the call left it out."""
        return self.values[position] if position < len(self.values) else self.named.get(name, default)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in order, including those in lists."""
        return [t for value in (*self.values, *self.named.values()) for t in _tensors_in(value)]


@functools.lru_cache(maxsize=65536)
def arguments(signature: str) -> Arguments:
    """Return the arguments in a signature; none where it is the operator's name alone."""
    body = msgspec.json.decode(signature)
    values = [_value(v) for v in body.get("args", [])]
    return Arguments(values, {name: _value(v) for name, v in body.get("kwargs", {}).items()})


def _value(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "t":
        dtype, shape, strides = content
        return Tensor(dtype, tuple(shape), tuple(strides))
    return [_value(v) for v in content] if kind == "l" else content


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors_in(v)] if isinstance(value, list) else []


VIEWS = "views"
MATRIX = "matrix products"
CONVOLUTIONS = "convolutions"
RECURRENT = "recurrent layers"
ATTENTION = "attention"
NORMALISATION = "normalisation"
SOFTMAX = "softmax"
LOSS = "loss"
EMBEDDING = "embedding"
REDUCTIONS = "reductions"
POOLING = "pooling"
OPTIMIZER = "optimizer"
RANDOM = "random"
COPIES = "copies"
ELEMENTWISE = "elementwise"
OTHER = "other"

OPERATORS: dict[str, str] = {
    MATRIX: """
        _addmm_activation _grouped_mm _int_mm _scaled_grouped_mm _scaled_mm _weight_int4pack_mm addbmm addmm
        addmv addr baddbmm bmm dot einsum ger linear matmul mkldnn_linear mm mv vdot
    """,
    CONVOLUTIONS: """
        _conv_depthwise2d _convolution _slow_conv2d_backward _slow_conv2d_forward conv_depthwise3d convolution
        convolution_backward convolution_backward_overrideable convolution_overrideable cudnn_convolution
        cudnn_convolution_transpose miopen_convolution mkldnn_convolution slow_conv3d slow_conv_transpose2d
        slow_conv_transpose3d
    """,
    RECURRENT: """
        _cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight _thnn_fused_gru_cell
        _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl gru lstm
        miopen_rnn miopen_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward rnn_relu rnn_tanh
    """,
    NORMALISATION: """
        _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward _native_batch_norm_legit
        _native_batch_norm_legit_functional batch_norm_backward batch_norm_backward_elemt
        batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats_with_counts batch_norm_stats
        cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward
        native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward
        native_layer_norm native_layer_norm_backward rms_norm
    """,
    SOFTMAX: """
        _log_softmax _log_softmax_backward_data _masked_softmax _masked_softmax_backward _safe_softmax _softmax
        _softmax_backward_data logsumexp
    """,
    LOSS: """
        _ctc_loss _ctc_loss_backward binary_cross_entropy binary_cross_entropy_backward
        binary_cross_entropy_with_logits huber_loss huber_loss_backward kl_div l1_loss mse_loss
        mse_loss_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
        smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
    """,
    EMBEDDING: """
        _embedding_bag _embedding_bag_dense_backward _embedding_bag_forward_only _index_put_impl_ _unsafe_index
        _unsafe_index_put embedding embedding_dense_backward embedding_renorm_ gather index index_add index_add_
        index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_select masked_scatter
        masked_select nonzero scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take
    """,
    REDUCTIONS: """
        _foreach_max _foreach_norm _unique2 all amax amin any argmax argmin argsort bincount count_nonzero
        cummax cummin cumprod cumsum equal histc isin kthvalue linalg_vector_norm max mean median min nansum
        norm prod searchsorted sort std std_mean sum topk unique_consecutive unique_dim var var_mean
    """,
    POOLING: """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
        adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
        avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward col2im grid_sampler_2d
        grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward im2col max_pool2d_with_indices
        max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool2d
        max_unpool3d pixel_shuffle pixel_unshuffle
    """,
    RANDOM: """
        _fused_dropout _standard_gamma bernoulli bernoulli_ cauchy_ exponential exponential_ geometric_
        log_normal_ multinomial native_dropout native_dropout_backward normal normal_ normal_functional rand
        rand_like randint randint_like randn randn_like random_ randperm uniform uniform_
    """,
    COPIES: """
        _chunk_cat _foreach_copy_ _foreach_zero_ _pin_memory _reshape_copy _to_copy arange as_strided_scatter cat
        chunk_cat clone constant_pad_nd contiguous copy copy_ diag_embed diagonal_backward eye fill fill_ flip full
        full_like lift_fresh_copy linspace masked_fill masked_fill_ new_full new_ones new_zeros one_hot ones
        ones_like pad
        reflection_pad1d reflection_pad2d reflection_pad2d_backward reflection_pad3d repeat repeat_interleave
        replication_pad1d replication_pad2d replication_pad2d_backward replication_pad3d
        replication_pad3d_backward roll rot90 scalar_tensor select_backward select_scatter slice_backward
        slice_scatter split_with_sizes_copy stack tile tril tril_ triu triu_ unfold_backward view_copy zero
        zero_ zeros zeros_like
    """,
    VIEWS: """
        _local_scalar_dense _nested_tensor_size _reshape_alias _unsafe_view adjoint alias as_strided chunk
        detach detach_ diagonal empty empty_like empty_permuted empty_strided expand imag is_nonzero is_pinned
        is_same_size item lift lift_fresh mT movedim narrow new_empty new_empty_strided numpy_T permute real
        requires_grad_ reshape resize_ select set_ slice split split_with_sizes squeeze squeeze_ swapaxes
        sym_numel sym_size sym_stride t t_ transpose transpose_ unbind unfold unsafe_chunk unsafe_split
        unsqueeze unsqueeze_ view view_as_complex view_as_real
    """,
    ELEMENTWISE: """
        _amp_update_scale_ _conj _prelu_kernel _prelu_kernel_backward abs acos acosh add addcdiv addcmul angle
        asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
        bitwise_xor ceil celu clamp clamp_max clamp_min complex conj conj_physical copysign cos cosh cross
        cumprod_backward digamma div elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax
        fmin fmod frac ge gelu gelu_backward glu glu_backward gt hardshrink hardsigmoid hardsigmoid_backward
        hardswish hardswish_backward hardtanh hardtanh_backward heaviside hypot isfinite isinf isnan isneginf
        isposinf le leaky_relu leaky_relu_backward lerp lgamma linalg_cross log log10 log1p log2 log_sigmoid
        log_sigmoid_backward log_sigmoid_forward logaddexp logical_and logical_not logical_or logical_xor logit
        logit_backward logsigmoid lt maximum minimum mish mish_backward mul nan_to_num ne neg polar pow prelu
        reciprocal relu relu6 relu_backward remainder renorm round rrelu_with_noise rrelu_with_noise_backward
        rsqrt rsub selu sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus softplus_backward
        softshrink sqrt square sub tan tanh tanh_backward threshold threshold_backward true_divide trunc where
        xlogy
    """,
}
"""Names of operators by class."""
_CLASS = {name: kind for kind, names in OPERATORS.items() for name in names.split()}


def base_name(name: str) -> str:
    """Return an operator's name without namespace and overload."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


@functools.cache
def operator_class(name: str) -> str:
    """Return the class of an operator, given as an overload or by its name alone; `OTHER` for unknown ones."""
    base = base_name(name)
    if known := _CLASS.get(base) or _CLASS.get(base.removesuffix("_")):
        return known
    if base.startswith(("_foreach_", "_fused_", "_amp_foreach")):
        return OPTIMIZER
    if "attention" in base or "attn" in base:
        return ATTENTION
    if base.startswith(("upsample_", "_upsample_")):
        return POOLING
    if base.startswith(("_fft_", "fft_")):
        return OTHER
    return _CLASS.get(base.removesuffix("_backward"), OTHER)


GATHER, SHARDS_OUT = "c10d._allgather_base_.default", "fsdp.split_with_sizes_copy.default"
SHARDS_IN, SCATTER = "fsdp.chunk_cat.default", "c10d._reduce_scatter_base_.default"
REDUCE, BROADCAST = "c10d.allreduce_.default", "c10d.broadcast_.default"
_SENT_SHARE = {GATHER: 1.0, SCATTER: 1.0, REDUCE: 2.0, BROADCAST: 1.0, "_c10d_functional.all_reduce.default": 2.0}
"""What each rank of N sends, as a multiple of B·(N−1)/N of B bytes: ring algorithms."""
COPY_OUT, COPY_IN, WAIT = "memfit.copy_out.default", "memfit.copy_in.default", "memfit.wait.default"
"""The operators of an applied step that copy to the host and back, and that wait for a copy."""
SUM, RING, BUBBLE = "memfit.sum", "memfit.ring", "memfit.bubble"
"""Operators put into a trace on paper, for which ranks that share a model wait at once: sums of activations, keys and
values that go round, and a pipeline that fills and drains."""
_WAITED_SHARE = {SUM: 2.0, RING: 1.0}
SMALL_BYTES = 4096
"""Sums up to this size are of losses and norms, which the host reads."""


class Collective(NamedTuple):
    """A collective call.

    Attributes:
        nbytes: Bytes of the whole that is gathered, reduced, or goes round.
        ranks: Ranks that take part.
    """

    name: str
    nbytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """The bytes that each rank sends."""
        share = _WAITED_SHARE.get(self.name) or _SENT_SHARE[self.name]
        return share * self.nbytes * (self.ranks - 1) / self.ranks

    @property
    def is_waited(self) -> bool:
        """Whether it was put in on paper, on the critical path."""
        return self.name in _WAITED_SHARE

    @property
    def text(self) -> str:
        """Its signature."""
        return json.dumps({"op": self.name, "args": [self.nbytes, self.ranks]}, separators=(",", ":"))


class Copy(NamedTuple):
    """A copy that was put into a trace on paper.

    Attributes:
        nbytes: Bytes that are copied.
        padded_bytes: Bytes of which a CPU's kernel makes padded copies first.
    """

    nbytes: int
    padded_bytes: int


class Share(NamedTuple):
    """One rank's share of an operator, put into a trace on paper.

    Attributes:
        whole: The signature of the whole operator.
        ranks: Ranks that share it.
    """

    whole: str
    ranks: int

    def text(self, name: str) -> str:
        """Return its signature, for an operator."""
        kwargs = {_SHARE: self.whole, "ranks": self.ranks}
        return json.dumps({"op": name, "kwargs": kwargs}, separators=(",", ":"))


_SHARE = "share_of"
_STARTS = tuple(f'{{"op":"{name}' for name in ("c10d.", "_c10d_functional.", SHARDS_OUT, SHARDS_IN, *_WAITED_SHARE))


def is_collective(name: str) -> bool:
    """Tell whether an operator sends."""
    return name in _SENT_SHARE


def among_ranks(signature: str) -> Collective | Copy | Share | None:
    """Return the collective, copy or rank's share in a signature; None for operators by themselves."""
    is_share = f'"kwargs":{{"{_SHARE}":' in signature
    if not is_share and not signature.startswith(_STARTS):
        return None
    body = json.loads(signature)
    args = body.get("args", ())
    if is_share:
        return Share(body["kwargs"][_SHARE], body["kwargs"]["ranks"])
    if body["op"] in (*_SENT_SHARE, *_WAITED_SHARE) and len(args) == 2:
        return Collective(body["op"], *args)
    if body["op"] in (SHARDS_OUT, SHARDS_IN) and len(args) == 1 and isinstance(args[0], int):
        return Copy(args[0], body.get("padded", 0))
    return None


def is_unmeasurable(signature: str) -> bool:
    """Tell whether an operator can't be measured by itself: it takes other ranks, or was put in on paper."""
    return among_ranks(signature) is not None or signature.startswith('{"op":"' + BUBBLE)


_KERNEL = "kernel\n"
_IN_PLACE = " bytes in place"


def kernel_text(members: tuple[str, ...], reused_bytes: int = 0) -> str:
    """Return the signature of a kernel.

    Args:
        members: The signatures of its operators.
        reused_bytes: The bytes that it writes over its dying inputs, less what it holds for others in its function.
    """
    return _KERNEL + "\n".join([*members, f"{reused_bytes}{_IN_PLACE}"])


def is_kernel(signature: str) -> bool:
    """Tell whether a signature is a kernel's."""
    return signature.startswith(_KERNEL)


def members_of(signature: str) -> tuple[str, ...]:
    """Return the signatures of a kernel's operators."""
    return tuple(signature.removeprefix(_KERNEL).split("\n")[:-1])


def reused_bytes_of(signature: str) -> int:
    """Return the bytes that a kernel writes over its dying inputs."""
    return int(signature.rpartition("\n")[2].removesuffix(_IN_PLACE))

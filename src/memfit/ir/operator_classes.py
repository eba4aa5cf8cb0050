"""Classes of operators, by the limit of their speed and by their usual names."""

from __future__ import annotations

import functools

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

_NAMES: dict[str, str] = {
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
_CLASS = {name: kind for kind, names in _NAMES.items() for name in names.split()}


@functools.cache
def operator_class(name: str) -> str:
    """Return the class of an operator, given as an overload or by its name alone; `OTHER` for unknown ones."""
    parts = name.split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    kind = _CLASS.get(base) or _CLASS.get(base.removesuffix("_"))
    return kind if kind is not None else _by_pattern(base)


def _by_pattern(base: str) -> str:
    if base.startswith(("_foreach_", "_fused_", "_amp_foreach")):
        return OPTIMIZER
    if "attention" in base or "attn" in base:
        return ATTENTION
    if base.startswith(("upsample_", "_upsample_")):
        return POOLING
    if base.startswith(("_fft_", "fft_")):
        return OTHER
    return _CLASS.get(base.removesuffix("_backward"), OTHER)

"""Every operator of ordinary steps has a class, and known ones the right one."""

from __future__ import annotations

import pytest
import torch

from memfit.cost import roofline
from memfit.ir import Trace, operator_class, throughput
from memfit.ir.operators import _CLASS, _NAMES, OTHER
from memfit.workload import Workload
from tests.gpus import AMPERE
from tests.models import BUILDERS, captured, plain_trace

KNOWN = {
    "aten.addmm.default": "matrix products",
    "aten.convolution_backward.default": "convolutions",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "attention",
    "aten._scaled_dot_product_cudnn_attention_backward.default": "attention",
    "flash_attn._flash_attn_forward.default": "attention",
    "aten.native_layer_norm_backward.default": "normalisation",
    "aten._fused_rms_norm.default": "normalisation",
    "aten.gelu_backward.default": "elementwise",
    "aten.add_.Tensor": "elementwise",
    "aten.linalg_vector_norm.default": "reductions",
    "aten._foreach_norm.Scalar": "reductions",
    "aten.embedding_dense_backward.default": "embedding",
    "aten._fused_adamw_.default": "optimizer",
    "aten._foreach_addcdiv_.ScalarList": "optimizer",
    "aten._to_copy.default": "copies",
    "aten.nll_loss2d_forward.default": "loss",
    "aten._log_softmax.default": "softmax",
    "aten.view.default": "views",
    "aten.empty_like.default": "views",
    "aten.bernoulli_.float": "random",
    "aten._cudnn_rnn.default": "recurrent layers",
    "aten.upsample_nearest2d_backward.default": "pooling",
    "mine.operator.default": OTHER,
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_operators(name: str) -> None:
    assert operator_class(name) == KNOWN[name]


def test_no_operator_has_two_classes() -> None:
    assert sum(len(names.split()) for names in _NAMES.values()) == len(_CLASS)


def test_most_listed_operators_are_torchs() -> None:
    """A misspelt name would never be found."""
    packets = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = {name for name in _CLASS if name not in packets}
    assert len(unknown) < 0.02 * len(_CLASS), unknown


def bert() -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    model = transformers.BertForMaskedLM(config).train()
    ids = torch.randint(0, 100, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Workload(model, {"x": ids}, lambda m, b: m(input_ids=b["x"], labels=b["x"]).loss, optimizer, name="bert")


def gpt2() -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=100, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 100, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Workload(model, {"x": ids}, lambda m, b: m(input_ids=b["x"], labels=b["x"]).loss, optimizer, name="gpt2")


def trace_of(name: str) -> Trace:
    made = {"bert": bert, "gpt2": gpt2}
    return captured(made[name]()) if name in made else plain_trace(name)


@pytest.mark.parametrize("name", [*BUILDERS, "bert", "gpt2"])
def test_hardly_any_time_is_in_operators_without_a_class(name: str) -> None:
    trace = trace_of(name)
    seconds = throughput(trace, roofline([trace], AMPERE), AMPERE).seconds_by_class
    assert seconds.get(OTHER, 0.0) < 0.02 * sum(seconds.values())

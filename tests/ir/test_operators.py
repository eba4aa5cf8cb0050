"""What the names and signatures of operators say, read without torch: arguments, classes, collectives."""

from __future__ import annotations

import pytest
import torch

from memfit.cost import roofline
from memfit.ir import (
    BUBBLE,
    ITEM_BYTES,
    RING,
    SUM,
    Collective,
    Tensor,
    Trace,
    arguments,
    collective_text,
    is_unmeasurable,
    operator_class,
    throughput,
    waited,
)
from memfit.ir.operators import _CLASS, _NAMES, OTHER
from memfit.workload import Workload, signature
from tests.gpus import AMPERE
from tests.models import BUILDERS, captured, plain_trace

aten = torch.ops.aten


def test_tensors_lists_and_names_come_back() -> None:
    x, w = torch.zeros(2, 3, 4), torch.zeros(5, dtype=torch.bfloat16)
    text = signature(aten.sum.dim_IntList, (x, [0, -1], True), {"dtype": torch.float64, "other": [w, None]})
    given = arguments(text)
    assert given.values == [Tensor("float32", (2, 3, 4), (12, 4, 1)), [0, -1], True]
    assert given.named == {"dtype": "float64", "other": [Tensor("bfloat16", (5,), (1,)), None]}
    assert given.tensors == [given.values[0], given.named["other"][0]]
    assert [t.nbytes for t in given.tensors] == [96, 10]
    assert given.get(2, "keepdim") is True and given.get(3, "dtype") == "float64" and given.get(7, "no", 5) == 5


def test_a_name_alone_has_no_arguments() -> None:
    assert arguments('{"op":"mine.operator.default"}').tensors == []


def test_item_sizes_are_torchs() -> None:
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        assert ITEM_BYTES.get(name, 1) == getattr(torch, name).itemsize
    for name in ("complex64", "complex128", "float8_e4m3fn", "uint16"):
        assert ITEM_BYTES.get(name, 1) == getattr(torch, name).itemsize


def test_channels_last_is_seen() -> None:
    x = torch.zeros(2, 3, 4, 4)
    for tensor, expected in ((x, False), (x.to(memory_format=torch.channels_last), True), (x[:, :1], False)):
        assert arguments(signature(aten.relu.default, (tensor,), {})).tensors[0].channels_last is expected


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


@pytest.mark.parametrize("name", [SUM, RING])
def test_what_is_waited_for_on_paper_is_read_back(name: str) -> None:
    assert waited(collective_text(name, 4096, 4)) == Collective(name, 4096, 4)
    assert is_unmeasurable(collective_text(name, 4096, 4))


@pytest.mark.parametrize("name", ["memfit.wait.default", "memfit.send.default", "memfit.summed.default"])
def test_other_operators_of_memfit_are_measured(name: str) -> None:
    signature = f'{{"op":"{name}","args":[{{"t":["float32",[2,3],[3,1]]}}]}}'
    assert waited(signature) is None and not is_unmeasurable(signature)


def test_a_pipeline_that_fills_is_not_waited_for_as_a_collective() -> None:
    assert waited(collective_text(BUBBLE, 8, 2)) is None and is_unmeasurable(collective_text(BUBBLE, 8, 2))

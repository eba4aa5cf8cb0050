"""What the names and signatures of operators say, read without torch: arguments, classes, collectives."""

from __future__ import annotations

import pytest
import torch

from memfit.cost import roofline
from memfit.ir import (
    BUBBLE,
    ITEM_BYTES,
    OPERATORS,
    RING,
    SUM,
    Collective,
    Tensor,
    among_ranks,
    arguments,
    is_unmeasurable,
    operator_class,
    throughput,
)
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
    names = (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn uint16"
    )
    for name in names.split():
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
    "mine.operator.default": "other",
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_operators(name: str) -> None:
    assert operator_class(name) == KNOWN[name]


def test_listed_operators_are_torchs_and_have_one_class() -> None:
    """A misspelt name would never be found."""
    names = [name for names in OPERATORS.values() for name in names.split()]
    packets = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = set(names) - packets
    assert len(names) == len(set(names)) and len(unknown) < 0.02 * len(names), unknown


def language_model(name: str) -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes)).train()
    else:
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, use_cache=False, **sizes)).train()
        model.loss_type = "ForCausalLM"
    update = torch.optim.AdamW(model.parameters(), foreach=name == "bert", fused=name == "gpt2")
    ids = torch.randint(0, 100, (4, 32))
    return Workload(model, {"x": ids}, lambda m, b: m(input_ids=b["x"], labels=b["x"]).loss, update, name=name)


@pytest.mark.parametrize("name", [*BUILDERS, "bert", "gpt2"])
def test_hardly_any_time_is_in_operators_without_a_class(name: str) -> None:
    trace = plain_trace(name) if name in BUILDERS else captured(language_model(name))
    seconds = throughput(trace, roofline([trace], AMPERE), AMPERE).seconds_by_class
    assert seconds.get("other", 0.0) < 0.02 * sum(seconds.values())


@pytest.mark.parametrize(
    ("text", "is_waited", "unmeasurable"),
    [
        (Collective(SUM, 4096, 4).text, True, True),
        (Collective(RING, 4096, 4).text, True, True),
        (Collective(BUBBLE, 4096, 4).text, False, True),
        *(
            (f'{{"op":"memfit.{name}.default","args":[{{"t":["float32",[2,3],[3,1]]}}]}}', False, False)
            for name in ("wait", "send", "summed")
        ),
    ],
)
def test_what_is_put_in_on_paper_is_read_back_and_not_measured(text: str, is_waited: bool, unmeasurable: bool) -> None:
    found = among_ranks(text)
    assert isinstance(found, Collective) == is_waited and is_unmeasurable(text) == unmeasurable
    assert not isinstance(found, Collective) or (found.text == text and found.is_waited)

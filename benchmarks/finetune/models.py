"""The Llamas that are fine-tuned: a small one that runs here, and one in the shape of 8 billion parameters on paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memfit import Workload

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, which all get adapters."""


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, and the rank of its adapters."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    rank: int
    dtype: torch.dtype = torch.float32


SMALL = Shape(layers=4, width=256, inner=704, heads=8, key_heads=2, vocabulary=16_000, rank=8)
TINY = Shape(layers=2, width=128, inner=352, heads=4, key_heads=1, vocabulary=2_000, rank=8)


def eight_billion(layers: int = 32) -> Shape:
    """Return the shape of Llama 3 8 B in bf16, with fewer layers where asked."""
    return Shape(layers, 4096, 14_336, 32, 8, vocabulary=128_256, rank=16, dtype=torch.bfloat16)


def model_of(shape: Shape, tokens: int, lora: bool) -> nn.Module:
    """Return a Llama in training mode; with `lora`, frozen but for peft's adapters, which are fp32 as by default."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with _default_dtype(shape.dtype):
        model = transformers.LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"  # the loss that it would take anyway, after printing a message
    if lora:
        import peft

        settings = peft.LoraConfig(r=shape.rank, lora_alpha=2 * shape.rank, target_modules=list(ADAPTED))
        model = peft.get_peft_model(model, settings).train()
    made: nn.Module = model
    return made


def llama(shape: Shape, tokens: int, *, lora: bool = False, seed: int = 0, samples: int = 1) -> Workload:
    """Return the step as its user writes it: sequences of so many tokens, the model's own loss, AdamW."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_of(shape, tokens, lora)
        batch = {"tokens": torch.randint(shape.vocabulary, (samples, tokens), device="cpu")}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name = f"{shape.layers}x{shape.width} {'LoRA' if lora else 'full'}, {tokens} tokens"
    return Workload(model, batch, loss, torch.optim.AdamW(trained), name=name)


def on_paper(make: Callable[[], Workload]) -> Workload:
    """Return a workload whose model has no data: only its batch takes memory."""
    with torch.device("meta"):
        return make()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token, by the model itself."""
    mean_loss: Tensor = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return mean_loss


def decoder_of(model: Any) -> tuple[Any, nn.Linear]:
    """Return the layers and the head of a Llama, under peft's wrapper too."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    return own.model, own.lm_head


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

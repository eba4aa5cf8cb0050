"""Language models of transformers, trained as the sources trained them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from benchmarks.published.building import (
    causal_loss,
    created,
    dtype,
    outputs_kept,
    softmax_with_input,
    trained,
    with_lora,
)
from memfit import Loop, Workload

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OLD = "written_out_until_torch_1_10"
LLAMA_3B = {
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    **{"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 128},
    **{"max_position_embeddings": 131072, "use_cache": False},
}
LLAMA_7B = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "use_cache": False},
}


def _old_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention written out as in 2021, with a softmax that keeps its input."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / query.shape[-1] ** 0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = softmax_with_input(scores, -1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(OLD, _old_attention)
AttentionMaskInterface.register(OLD, eager_mask)


def bert_large(batch: int, checkpointed: bool = False, adafactor: bool = False) -> Workload:
    """BERT-large with a classification head, 512 tokens, in transformers' Trainer of January 2022."""
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation=OLD,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.empty(batch, 512, dtype=torch.long)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if adafactor:
        optimizer = transformers.Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["tokens"]).logits
        return nn.functional.cross_entropy(logits.view(-1, 2), batch["labels"].view(-1))

    return Workload(
        model,
        {"tokens": tokens, "labels": torch.empty(batch, dtype=torch.long)},
        loss,
        optimizer,
        max_grad_norm=1.0,
        loop=Loop(zero_grad="after-step", set_to_none=False),
    )


def gpt2(batch: int, length: int, checkpointed: bool) -> Workload:
    """GPT-2 of 124 million parameters, in PyTorch's tutorial on Mosaic."""
    config = transformers.GPT2Config(use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = {"tokens": torch.empty(batch, length, dtype=torch.long)}
    return Workload(
        model,
        tokens,
        lambda model, batch: model(input_ids=batch["tokens"], labels=batch["tokens"]).loss,
        torch.optim.AdamW(model.parameters(), lr=1e-5),
        loop=Loop(holds_outputs="next-forward", zero_grad="before-forward"),
    )


def roberta(batch: int, length: int) -> Workload:
    """RoBERTa-base with a classification head, in transformers' Trainer of 2024."""
    config = transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_labels=2, pad_token_id=1
    )
    model = transformers.RobertaForSequenceClassification(config).train()
    tokens = {
        "input_ids": torch.randint(5, 1000, (batch, length)),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.long),
        "labels": torch.zeros(batch, dtype=torch.long),
    }
    return Workload(
        model,
        tokens,
        lambda model, batch: model(**batch).loss,
        torch.optim.AdamW(model.parameters()),
        max_grad_norm=1.0,
        loop=Loop(zero_grad="after-step"),
    )


def vit_base(batch: int) -> Workload:
    """ViT-base/16 with a classification head, in transformers' Trainer of 2024."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=2)).train()
    images = {"pixel_values": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    return Workload(
        model,
        images,
        lambda model, batch: model(**batch).loss,
        torch.optim.AdamW(model.parameters()),
        max_grad_norm=1.0,
        loop=Loop(zero_grad="after-step"),
    )


def _nothing(model: nn.Module) -> list[nn.Module]:
    return []


def _causal(
    model: nn.Module,
    batch: int,
    length: int,
    rank: int,
    dropout: float,
    upcast: bool,
    divisor: float = 0.0,
    cached: Callable[[nn.Module], list[nn.Module]] = _nothing,
) -> Workload:
    if rank:
        with_lora(model, _ATTENTION, rank, dropout)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.train()
    tokens = {"tokens": torch.empty(batch, length, dtype=torch.long)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # transformers computes the loss within the model's forward pass, whose variables are alive meanwhile
        with outputs_kept(cached(model)) as cache:
            hidden = model.base_model(input_ids=batch["tokens"])[0]  # type: ignore[operator]
        logits = model.lm_head(hidden)  # type: ignore[operator]
        if divisor:  # Granite in transformers 4.45 gives each result the name of what it came from, which is then free
            logits = logits / divisor
            logits = logits.float()
        loss = causal_loss(logits, batch["tokens"], upcast)
        del cache  # like the outputs of the model, it goes when the Trainer has the loss
        return loss

    return Workload(
        model,
        tokens,
        loss,
        torch.optim.AdamW(trained(model), weight_decay=0.01),
        max_grad_norm=1.0,
        loop=Loop(zero_grad="after-step"),
    )


def santacoder(batch: int, length: int = 2048) -> Workload:
    """Santacoder (1.1 billion parameters, one head of keys), fully fine-tuned in bfloat16 with checkpointing.

    transformers 4.48 does not turn this model's cache off where it checkpoints (`modeling_gpt_bigcode.py`). A layer's
    keys and values are views of its one projection, so that the cache keeps queries too until the loss is there.
    """
    config = transformers.GPTBigCodeConfig(
        vocab_size=49280, n_positions=2048, n_embd=2048, n_layer=24, n_head=16, n_inner=8192, use_cache=False
    )
    with dtype(torch.bfloat16):
        model = transformers.GPTBigCodeForCausalLM(config)

    def projections(model: nn.Module) -> list[nn.Module]:
        return [module for name, module in model.named_modules() if name.endswith(".attn.c_attn")]

    return _causal(model, batch, length, 0, 0.0, upcast=False, cached=projections)


def mistral(batch: int, length: int = 4096) -> Workload:
    """Mistral 7B in bfloat16 with LoRA of rank 16 and checkpointing."""
    config = transformers.MistralConfig(use_cache=False, sliding_window=None)
    with dtype(torch.bfloat16):
        model = transformers.MistralForCausalLM(config)
    return _causal(model, batch, length, 16, 0.1, upcast=True)


def power_lm(batch: int, length: int = 4096) -> Workload:
    """PowerLM 3B in bfloat16 with LoRA of rank 16 and checkpointing."""
    config = transformers.GraniteConfig(
        vocab_size=49152,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=40,
        num_attention_heads=36,
        num_key_value_heads=36,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=9.0,
        residual_multiplier=0.22,
    )
    with dtype(torch.bfloat16):
        model = transformers.GraniteForCausalLM(config)
    return _causal(model, batch, length, 16, 0.1, upcast=True, divisor=9.0)


def llama_3b(kind: str, length: int, batch: int = 4) -> Workload:
    """Llama 3.2 3B in bfloat16: all of it ("full"), LoRA of rank 32 on queries and values, or the norms alone."""
    with dtype(torch.bfloat16):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_3B)).train()
    if kind == "lora":
        with_lora(model, ("q_proj", "v_proj"), 32, 0.0)
    if kind == "norms":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    tokens = {"tokens": torch.empty(batch, length, dtype=torch.long)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return causal_loss(model(input_ids=batch["tokens"]).logits, batch["tokens"])

    return Workload(
        model,
        tokens,
        loss,
        torch.optim.AdamW(trained(model)),
        max_grad_norm=1.0,
        loop=Loop(holds_outputs="next-forward"),
    )


def llama_created(
    size: str, rank: int, names: list[str], positions: int, caches: int = 1, layer_in_front: bool = False
) -> Workload:
    """A Llama in bfloat16 with its LoRA adapters, made by torchtune and not run.

    Args:
        size: "3B" or "7B".
        rank: Rank of the adapters.
        names: Layers that have adapters.
        positions: Positions for which sines and cosines are kept, in float32.
        caches: Number of these tables.
        layer_in_front: Whether the layers are copies of one, which lives meanwhile (torchtune of April 2024).
    """
    given = dict(LLAMA_3B if size == "3B" else LLAMA_7B)
    width = given["hidden_size"] // given["num_attention_heads"]
    given["num_hidden_layers"] += layer_in_front
    with dtype(torch.bfloat16):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    with_lora(model, tuple(names), rank, 0.0, torch.bfloat16)
    for i in range(caches):
        model.register_buffer(f"positions_{i}", torch.empty(positions, width // 2, 2))
    return created(model)

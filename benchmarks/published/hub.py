"""LitGPT's LoRA script of 2024 with the settings of its `config_hub`, by LitGPT's own model and loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.published.building import dtype, trained
from memfit import Loop, Workload

_PARTS = ("query", "key", "value", "projection", "mlp", "head")


def lora(name: str, batch: int, rank: int, everywhere: bool, length: int = 512) -> Workload:
    """A model of LitGPT in bfloat16 with adapters on queries and values, or on all of its linear layers.

    The loop gives logits and loss names that live until the next step has computed its own.
    """
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
    from litgpt.utils import chunked_cross_entropy

    parts = {f"lora_{part}": everywhere or part in ("query", "value") for part in _PARTS}
    config = Config.from_name(name, lora_r=rank, lora_alpha=16, lora_dropout=0.1 if "emma" in name else 0.05, **parts)
    with dtype(torch.bfloat16):
        model = GPT(config).train()
    mark_only_lora_as_trainable(model)
    model.max_seq_length = length
    tokens = torch.zeros(batch, length, dtype=torch.long)

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        # Fabric turns what a module gives to the default type
        logits = [chunk.float() for chunk in model(batch["tokens"], lm_head_chunk_size=128)]
        logits[-1] = logits[-1][..., :-1, :]
        return chunked_cross_entropy(logits, batch["labels"][..., 1:])

    return Workload(
        model,
        {"tokens": tokens, "labels": torch.zeros_like(tokens)},
        loss,
        torch.optim.AdamW(trained(model)),
        loop=Loop(holds_outputs="next-forward", zero_grad="after-step"),
    )

"""Adapters of an 8-billion-parameter Llama on 8,192 tokens: to be estimated and planned without its GPU.

`memfit plan examples/llama_lora.py:llama_8b --device rtx-4090 --budget 100%` finds how it fits a card of 24 GB: it does
not as it is, nor with checkpoints alone. The model has bf16 weights, and rank 16 beside all linear layers of a block,
in fp32, as peft has it by default.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from memfit import Workload

VOCABULARY = 128_256
TOKENS = 8192
RANK = 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRA(nn.Module):
    """A frozen linear layer with a product of low rank added (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False, dtype=torch.float32)
        self.b = nn.Linear(RANK, base.out_features, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return (result + self.b(self.a(x.float()))).to(result.dtype)


def llama_8b() -> Workload:
    """32 layers of width 4096: 8.03 billion parameters."""
    return llama("llama_8b", layers=32)


def llama_8b_of_2_layers() -> Workload:
    """The same in 2 layers, to try it in a minute."""
    return llama("llama_8b_of_2_layers", layers=2)


def llama(name: str, *, layers: int, width: int = 4096, tokens: int = TOKENS) -> Workload:
    """Return a step of adapters of a Llama in the shape of the 8 billion one, trained with AdamW."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        vocab_size=VOCABULARY,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config).requires_grad_(False).train()
    finally:
        torch.set_default_dtype(default)
    model.loss_type = "ForCausalLM"  # the loss that it would take anyway, after printing a message
    for module in list(model.modules()):
        for child in ADAPTED:
            if isinstance(getattr(module, child, None), nn.Linear):
                setattr(module, child, LoRA(getattr(module, child)))
    trained = [p for p in model.parameters() if p.requires_grad]
    return Workload(
        model=model,
        batch={"tokens": torch.randint(VOCABULARY, (1, tokens))},
        loss_fn=loss,
        optimizer=torch.optim.AdamW(trained),
        name=name,
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token."""
    mean_loss: Tensor = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return mean_loss

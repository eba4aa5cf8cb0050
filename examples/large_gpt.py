"""GPTs of 1, 7 and 175 billion parameters: to be estimated and planned, not run, on a machine without their GPU.

`memfit estimate examples/large_gpt.py:gpt_1b --device a100-80gb` builds them under fake tensors, so that they
take no memory. The sizes are those of the GPT-3 paper (Brown et al. 2020, table 2.1) and of its neighbours.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from memfit import Workload

CONTEXT = 2048
VOCABULARY = 50257


def gpt_1b() -> Workload:
    """24 layers of width 1792: 1.02 billion parameters."""
    return gpt("gpt_1b", n_layer=24, width=1792, n_head=14, batch_size=8)


def gpt_7b() -> Workload:
    """32 layers of width 4096: 6.66 billion parameters."""
    return gpt("gpt_7b", n_layer=32, width=4096, n_head=32, batch_size=4)


def gpt_7b_of_8() -> Workload:
    """The same, with as many samples for each of 8 ranks."""
    return gpt("gpt_7b_of_8", n_layer=32, width=4096, n_head=32, batch_size=8 * 4)


def gpt_175b() -> Workload:
    """96 layers of width 12288: 175 billion parameters, with a sample for each of 1024 ranks."""
    return gpt("gpt_175b", n_layer=96, width=12288, n_head=96, batch_size=1024)


def gpt(name: str, *, n_layer: int, width: int, n_head: int, batch_size: int) -> Workload:
    """Return a step of a GPT on sequences of 2048 tokens, trained with AdamW."""
    config = transformers.GPT2Config(
        n_layer=n_layer,
        n_embd=width,
        n_head=n_head,
        n_positions=CONTEXT,
        vocab_size=VOCABULARY,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # the loss that it would take anyway, after printing a message
    return Workload(
        model=model,
        batch={"tokens": torch.randint(VOCABULARY, (batch_size, CONTEXT))},
        loss_fn=loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        name=name,
        max_grad_norm=1.0,
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token."""
    mean_loss: Tensor = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return mean_loss

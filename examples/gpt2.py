"""GPT-2 from the transformers library, unmodified, on the bytes of Python's standard library."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from memfit.recipes import SeededBatches, even_windows, python_source, random_windows
from memfit.workload import Workload

CONTEXT = 256
BATCH_SIZE = 8


def workload() -> Workload:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=192,
        n_head=6,
        n_positions=CONTEXT,
        vocab_size=1024,
        bos_token_id=256,
        eos_token_id=256,
        use_cache=False,  # keys and values are kept for generation; training has no use for them
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # the loss that it would take anyway, after printing a message
    batches = SeededBatches(partial(random_windows, python_source("training"), BATCH_SIZE, CONTEXT), 200, seed=0)
    return Workload(
        model=model,
        batch=batches.make(epoch=0, index=0),
        loss_fn=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        name="gpt2",
        batches=batches,
        evaluate=evaluate,
        max_grad_norm=1.0,
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mean_loss: Tensor = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return mean_loss


def evaluate(model: nn.Module) -> dict[str, float]:
    device = next(model.parameters()).device
    windows = even_windows(python_source("validation"), 32, CONTEXT)["tokens"].to(device)
    losses = [loss(model, {"tokens": tokens}).item() for tokens in windows.chunk(4)]
    return {"validation_loss": sum(losses) / len(losses)}

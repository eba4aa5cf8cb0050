"""A small training for ranks that are killed: dropout, shuffled data, an evaluation, a batch that does not divide."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.distributed.models import TOKENS, VOCABULARY, Transformer, loss_of
from memfit.workload import Workload

SAMPLES, BATCH = 44, 8


class Dropping(Transformer):
    """The Transformer with dropout in front of its blocks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(self.embedding(tokens), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def workload() -> Workload:
    """Return the workload: five batches of eight samples an epoch, and one of four."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=drawn)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=_stacked, generator=torch.Generator().manual_seed(2))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = Dropping()
    return Workload(
        model,
        next(iter(DataLoader(data, BATCH, collate_fn=_stacked))),
        loss_of,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        batches=loader,
        max_grad_norm=1.0,
    )


def _stacked(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}

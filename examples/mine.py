"""The workload of the README and of the quickstart: eight blocks of linear layers."""

import torch
import torch.nn.functional as F
from torch import nn

import memfit


def workload() -> memfit.Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(256, 10))
    return memfit.Workload(
        model=model,
        batch={"x": torch.randn(1024, 256), "y": torch.randint(0, 10, (1024,))},
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=torch.optim.AdamW(model.parameters()),
        name="mine",
    )

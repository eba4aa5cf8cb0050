"""A model of frozen blocks with adapters that train, as a language model under LoRA, and its weights in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from memfit import Workload
from memfit.ir import HostWeights, Levers, Region

COUNT, WIDTH, MATRIX_BYTES = 4, 128, 128 * 512 * 4
NAMES = tuple(f"blocks.{i}" for i in range(COUNT))
HELD = HostWeights(modules=NAMES, host_bytes=2 * COUNT * MATRIX_BYTES)
PLAIN = Levers(microbatch_size=8)
IN_HOST = replace(PLAIN, host_weights=HELD)
EACH = tuple(Region((name,)) for name in NAMES)


class Block(nn.Module):
    """A frozen MLP with an adapter that trains."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH)).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1), nn.Linear(4, WIDTH)).requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.mlp(h) + self.adapter(h)
        return out


class Model(nn.Module):
    """A stack of blocks; the input is frozen, so that the first block's has no gradient."""

    def __init__(self, first: int = 0, call: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(trains=i >= first) for i in range(COUNT))
        self.head, self.call = nn.Linear(WIDTH, 8), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        out: Tensor = self.head(x)
        return out


def made(**options: Any) -> Workload:
    torch.manual_seed(0)
    model = Model(**options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Workload(model, torch.randn(8, 32, 16), lambda m, x: m(x).square().mean(), optimizer, name="adapted")

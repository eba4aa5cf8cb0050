"""The models of the benchmark: tied weights, a frozen prefix, a Transformer, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.workload import Workload

WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 96, 4, 32, 512, 16


class Block(nn.Module):
    """A block of a Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """A language model, with or without tied weights and a frozen beginning."""

    def __init__(self, *, tied: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        if frozen:
            self.embedding.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Convolutions(nn.Module):
    """Residual blocks of convolutions with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, 48), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)) for _ in range(4)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    logits = model(batch["inputs"])
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())


def _workload(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int) -> Workload:
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = {"inputs": inputs[:batch_size], "targets": targets[:batch_size]}
    return Workload(model, batch, loss_of, torch.optim.AdamW(trained, lr=1e-3), max_grad_norm=1.0)


def _language_model(**options: Any) -> Callable[[int], Workload]:
    def make(batch_size: int = BATCH) -> Workload:
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (batch_size, TOKENS + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return _workload(Transformer(**options), inputs, targets, batch_size)

    return make


def _convolutions(batch_size: int = BATCH) -> Workload:
    torch.manual_seed(0)
    images, labels = torch.randn(batch_size, 3, 16, 16), torch.randint(10, (batch_size,))
    return _workload(Convolutions(), images, labels, batch_size)


MODELS: dict[str, Callable[..., Workload]] = {
    "transformer": _language_model(),
    "tied": _language_model(tied=True),
    "frozen": _language_model(frozen=2),
    "convolutions": _convolutions,
}
"""Each makes a workload of a global batch of some samples."""

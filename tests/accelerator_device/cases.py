"""What is trained on the CPU and on the device alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer's block, with dropout in and after its attention."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Embeddings, a block and the loss of the next word."""

    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.block, self.head = Block(width), nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        logits = self.head(self.block(self.words(x) + self.places(places)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def _with_loss(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: module(x).float().pow(2).mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "block": lambda: (Block(), torch.randn(2, 16, 32)),
    "attention dropout": lambda: (Block(attention_dropout=0.3), torch.randn(2, 16, 32)),
    "convnet": lambda: (convnet(), torch.randn(4, 3, 12, 12)),
    "language model": lambda: (LanguageModel(), torch.randint(0, 50, (2, 16))),
}


def train(
    name: str,
    device: str,
    steps: int = 3,
    autocast: torch.dtype | None = None,
    scaler: bool = False,
    **options: bool,
) -> list[torch.Tensor]:
    """Return losses, weights, buffers and the optimizer's state after some steps."""
    torch.manual_seed(0)
    module, x = MODELS[name]()
    module, x = module.to(device), x.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
    scale = torch.amp.GradScaler(device, enabled=scaler, init_scale=1024.0)
    run = module if isinstance(module, LanguageModel) else _with_loss(module)
    found: list[torch.Tensor] = []
    torch.manual_seed(1)
    for _ in range(steps):
        with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = run(x)
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += module.state_dict().values()
    found += [value for state in optimizer.state.values() for value in state.values()]
    return [value.cpu() for value in found]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{i}: {(a - b).abs().max()}"

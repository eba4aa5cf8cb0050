"""Models that Jittor is tested on."""

from __future__ import annotations

from typing import Any

import jittor as jt

nn = jt.nn


def mlp(layers: int = 24, width: int = 128) -> Any:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


class Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm(channels)
        self.dropout = nn.Dropout(dropout, is_train=True)
        self.conv2 = nn.Conv(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm(channels)

    def execute(self, x: Any) -> Any:
        hidden = self.dropout(nn.relu(self.bn1(self.conv1(x))))
        return nn.relu(x + self.bn2(self.conv2(hidden)))


def residuals(blocks: int = 8, channels: int = 8, dropout: float = 0.0) -> Any:
    return nn.Sequential(*(Residual(channels, dropout) for _ in range(blocks)))


class Block(nn.Module):  # type: ignore[misc]
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout, is_train=True)

    def attention(self, x: Any) -> Any:
        samples, length, width = x.shape
        q, k, v = (
            part.reshape((samples, length, self.heads, -1)).transpose(0, 2, 1, 3)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        weights = nn.softmax(nn.bmm_transpose(q, k) * (width // self.heads) ** -0.5, dim=-1)
        return self.out(nn.bmm(weights, v).transpose(0, 2, 1, 3).reshape((samples, length, width)))

    def execute(self, x: Any) -> Any:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.down(nn.gelu(self.up(self.norm2(x))))


def transformer(blocks: int = 6, width: int = 32, heads: int = 2, dropout: float = 0.0) -> Any:
    return nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))

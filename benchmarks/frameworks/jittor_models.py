"""A U-Net in two or three dimensions and a small Transformer, in Jittor; `torch_models` holds the same ones."""

from __future__ import annotations

from typing import Any

import jittor as jt
from jittor import nn


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)

    def execute(self, x: Any) -> Any:
        return nn.relu(self.norm2(self.conv2(nn.relu(self.norm1(self.conv1(x))))))


class Up(nn.Module):
    """Doubles the resolution, joins what was there on the way down, and convolves."""

    def __init__(self, inputs: int, outputs: int, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv = DoubleConv(inputs + outputs, outputs, conv, norm)

    def execute(self, x: Any, skip: Any) -> Any:
        for axis in range(2, len(x.shape)):
            shape = list(x.shape)
            x = x.unsqueeze(axis + 1).broadcast([*shape[: axis + 1], 2, *shape[axis + 1 :]])
            x = x.reshape([*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]])
        return self.conv(jt.concat([x, skip], dim=1))


class UNet(nn.Module):
    """Base channels double with each of the levels."""

    def __init__(
        self, *, inputs: int = 3, outputs: int = 2, base: int = 8, levels: int = 3, dims: int = 2, norm: Any = None
    ) -> None:
        super().__init__()
        norm = norm or nn.BatchNorm
        conv = nn.Conv if dims == 2 else nn.Conv3d
        widths = [base * 2**level for level in range(levels + 1)]
        self.levels = levels
        self.pool = nn.Pool(2, op="maximum") if dims == 2 else nn.Pool3d(2, op="maximum")
        for level, width in enumerate(widths):
            setattr(self, f"down{level}", DoubleConv(widths[level - 1] if level else inputs, width, conv, norm))
        for level in range(levels):
            setattr(self, f"up{level}", Up(widths[level + 1], widths[level], conv, norm))
        self.head = conv(base, outputs, 1)

    def execute(self, x: Any) -> Any:
        skips = []
        for level in range(self.levels):
            x = getattr(self, f"down{level}")(x)
            skips.append(x)
            x = self.pool(x)
        x = getattr(self, f"down{self.levels}")(x)
        for level in reversed(range(self.levels)):
            x = getattr(self, f"up{level}")(x, skips[level])
        return self.head(x)


class Block(nn.Module):
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

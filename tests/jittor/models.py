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

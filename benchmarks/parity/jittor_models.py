"""The residual network for digits, in Jittor."""

from __future__ import annotations

from typing import Any

from jittor import nn


class Residual(nn.Module):
    """A block whose convolutions are normalised by BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm(channels),
            nn.ReLU(),
            nn.Conv(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm(channels),
        )

    def execute(self, x: Any) -> Any:
        return nn.relu(x + self.inner(x))


class Head(nn.Module):
    """Class scores from the mean of each channel in each quarter of the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(4 * channels, 10)

    def execute(self, x: Any) -> Any:
        samples, channels, height, width = x.shape
        quarters = x.reshape((samples, channels, 2, height // 2, 2, width // 2)).mean(dims=(3, 5))
        return self.linear(self.dropout(quarters.reshape((samples, -1))))


def resnet(channels: int, blocks: int) -> Any:
    """Return the network."""
    stem = nn.Conv(1, channels, 3, padding=1, bias=False)
    body = [Residual(channels) for _ in range(blocks)]
    return nn.Sequential(stem, nn.BatchNorm(channels), nn.ReLU(), *body, Head(channels))

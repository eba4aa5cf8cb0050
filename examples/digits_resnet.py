"""A small residual network with BatchNorm on scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.workload import Workload

BATCH_SIZE = 128
N_HELD_OUT = 360


class ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        ResidualBlock(32, 32, stride=1),
        ResidualBlock(32, 64, stride=2),
        ResidualBlock(64, 128, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def digits(size: int) -> tuple[Tensor, Tensor]:
    """The images, enlarged from 8x8 to size x size, and their labels, in random order."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def workload(size: int = 32) -> Workload:
    """Return the training step on images of size x size."""
    torch.manual_seed(0)
    images, labels = digits(size)
    held_out_images, held_out_labels = images[:N_HELD_OUT], labels[:N_HELD_OUT]
    train = TensorDataset(images[N_HELD_OUT:], labels[N_HELD_OUT:])
    shuffle = torch.Generator().manual_seed(0)
    model = resnet()

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        predicted = [model(part.to(device)).argmax(1).cpu() for part in held_out_images.chunk(3)]
        return {"accuracy": (torch.cat(predicted) == held_out_labels).float().mean().item()}

    return Workload(
        model=model,
        batch=list(train[:BATCH_SIZE]),
        loss_fn=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        name="digits_resnet",
        batches=DataLoader(train, BATCH_SIZE, shuffle=True, drop_last=True, generator=shuffle),
        evaluate=evaluate,
    )

"""The digits ResNet on images of 16 × 16, half the size of the other example's, to train in minutes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.digits_resnet import BATCH_SIZE, N_HELD_OUT, digits, loss, resnet
from memfit import Workload


def workload() -> Workload:
    """Return its training step."""
    torch.manual_seed(0)
    images, labels = digits()
    images = F.avg_pool2d(images, 2)
    held_out_images, held_out_labels = images[:N_HELD_OUT], labels[:N_HELD_OUT]
    train = TensorDataset(images[N_HELD_OUT:], labels[N_HELD_OUT:])
    shuffle = torch.Generator().manual_seed(0)
    model = resnet()

    def evaluate(model: nn.Module) -> dict[str, float]:
        predicted = model(held_out_images.to(next(model.parameters()).device)).argmax(1).cpu()
        return {"accuracy": (predicted == held_out_labels).float().mean().item()}

    return Workload(
        model=model,
        batch=list(train[:BATCH_SIZE]),
        loss_fn=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        name="digits",
        batches=DataLoader(train, BATCH_SIZE, shuffle=True, drop_last=True, generator=shuffle),
        evaluate=evaluate,
    )

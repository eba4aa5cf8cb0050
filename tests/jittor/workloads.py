"""Workloads that plans in Jittor are tested on."""

from __future__ import annotations

from typing import Any

import jittor as jt
import numpy as np

from benchmarks.frameworks.jittor_models import UNet
from benchmarks.frameworks.subject import UNetSizes
from memfit.jittor import Workload, seed

nn = jt.nn


def group_norm(channels: int) -> Any:
    return nn.GroupNorm(4, channels)


def unet(norm: Any = group_norm, size: int = 128, samples: int = 8) -> Workload:
    """A 2-D U-Net on noise; with GroupNorm, so that microbatches leave the training as it is."""
    seed(0)
    model = UNet(UNetSizes(), norm)
    random = np.random.RandomState(0)
    batch = {
        "x": jt.array(random.randn(samples, 3, size, size).astype("float32")).stop_grad(),
        "y": jt.array((random.rand(samples, size, size) > 0.5).astype("int32")),
    }

    def loss_fn(model: Any, batch: Any) -> Any:
        return nn.cross_entropy_loss(model(batch["x"]), batch["y"])

    return Workload(model, batch, loss_fn, jt.optim.Adam(model.parameters(), 1e-3), name="U-Net")


def wrong() -> int:
    return 3

"""Metric and contrastive learning by packages on PyPI: losses, miners and pairs of encoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit import Workload


def _embedder(features: int = 64) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, features))


def _labelled(samples: int = 32) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 32, 32), "y": torch.arange(samples) % 8}


def mined_triplets() -> Workload:
    """Return pytorch-metric-learning's example: triplets mined from the embeddings, and their loss."""
    from pytorch_metric_learning import distances, losses, miners, reducers

    torch.manual_seed(0)
    model, distance = _embedder(), distances.CosineSimilarity()
    triplets = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0))
    mine = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        embeddings = model(batch["x"])
        mean: Tensor = triplets(embeddings, batch["y"], mine(embeddings, batch["y"]))
        return mean

    return Workload(
        model=model, batch=_labelled(), loss_fn=loss, optimizer=torch.optim.Adam(model.parameters(), lr=0.01)
    )


def supervised_contrastive() -> Workload:
    """Return pytorch-metric-learning's supervised contrastive loss."""
    from pytorch_metric_learning.losses import SupConLoss

    torch.manual_seed(0)
    model, contrastive = _embedder(), SupConLoss(temperature=0.1)
    return Workload(
        model=model,
        batch=_labelled(64),
        loss_fn=lambda model, batch: contrastive(model(batch["x"]), batch["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.001),
    )


def arcface() -> Workload:
    """Return pytorch-metric-learning's ArcFace loss, which has weights of its own."""
    from pytorch_metric_learning.losses import ArcFaceLoss

    torch.manual_seed(0)
    both = nn.ModuleDict({"model": _embedder(), "loss": ArcFaceLoss(num_classes=1000, embedding_size=64)})

    def loss(both: Any, batch: dict[str, Tensor]) -> Tensor:
        mean: Tensor = both["loss"](both["model"](batch["x"]), batch["y"])
        return mean

    return Workload(
        model=both,
        batch=_labelled(64),
        loss_fn=loss,
        optimizer=torch.optim.SGD(both.parameters(), lr=0.01, momentum=0.9),
    )


def x_clip() -> Workload:
    """Return x-clip's pair of encoders with its filtered losses, by its README."""
    from x_clip import CLIP

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "dim_text": 128, "dim_image": 128, "dim_latent": 64, "num_text_tokens": 1000, "text_enc_depth": 2,
        "text_seq_len": 64, "text_heads": 4, "visual_enc_depth": 2, "visual_image_size": 64, "visual_patch_size": 8,
        "visual_heads": 4, "visual_patch_dropout": 0.5,
    }  # fmt: skip
    model = CLIP(**sizes, use_all_token_embeds=False, decoupled_contrastive_learning=True)
    return Workload(
        model=model,
        batch={"text": torch.randint(1, 1000, (8, 64)), "images": torch.randn(8, 3, 64, 64)},
        loss_fn=lambda model, batch: model(batch["text"], batch["images"], return_loss=True),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
    )


def byol() -> Workload:
    """Return byol-pytorch's learner, which keeps an average of its encoder and looks at its hidden layer by a hook."""
    from byol_pytorch import BYOL

    torch.manual_seed(0)
    model = BYOL(_embedder(), image_size=32, hidden_layer=-1, projection_size=64, projection_hidden_size=128)
    return Workload(
        model=model,
        batch=torch.rand(16, 3, 32, 32),
        loss_fn=lambda model, images: model(images),
        optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-4),
    )

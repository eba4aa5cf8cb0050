"""Image models of torchvision and timm, trained as the sources trained them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.packages import torchvision_operators  # noqa: F401  declares operators before torchvision is imported
from benchmarks.published.building import created as only_created
from benchmarks.published.building import dtype, flash_of_packed_tokens
from memfit import Loop, Workload


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _classify_in_2023(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # Fabric converts what a module is given to its precision; the loop holds the loader's float32 images meanwhile
    given = {**batch, "x": batch["x"].to(next(model.parameters()).dtype)}
    with flash_of_packed_tokens():
        return _classify(model, given)


def _images(batch: int, pixels: int) -> dict[str, Tensor]:
    return {"x": torch.empty(batch, 3, pixels, pixels), "y": torch.zeros(batch, dtype=torch.long)}


def _torchvision(name: str, **options: Any) -> nn.Module:
    make = getattr(importlib.import_module("torchvision.models"), name)
    model: nn.Module = make(weights=None, **options)
    return model.train()


def vit_large(batch: int, half: bool = False, classes: int = 10, created: bool = False) -> Workload:
    """torchvision's ViT-L/16 with Adam, in a nightly torch 2.1 of June 2023; the loop holds the logits."""
    kind = torch.bfloat16 if half else torch.float32
    with dtype(kind):
        model = _torchvision("vit_l_16", num_classes=classes)
    if created:
        return only_created(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    loop = Loop(holds_outputs="next-forward", zero_grad="after-forward")
    return Workload(model, _images(batch, 224), _classify_in_2023, optimizer, loop=loop)


def torchvision_adam(name: str, batch: int, pixels: int = 224) -> Workload:
    """A model of torchvision for ImageNet with Adam."""
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    model = _torchvision(name, **options)
    return Workload(
        model,
        _images(batch, pixels),
        _classify,
        torch.optim.Adam(model.parameters()),
        loop=Loop(zero_grad="before-forward", holds_outputs="next-forward"),
    )


def timm_adam(name: str, batch: int, pixels: int = 224) -> Workload:
    """A model of timm for ImageNet with Adam."""
    model = importlib.import_module("timm").create_model(name).train()
    return Workload(
        model,
        _images(batch, pixels),
        _classify,
        torch.optim.Adam(model.parameters()),
        loop=Loop(zero_grad="before-forward", holds_outputs="next-forward"),
    )


def timm_sgd(name: str, batch: int, pixels: int = 224, channels_last: bool = True) -> Workload:
    """A model of timm in its own training benchmark: SGD with momentum, fp16 autocast around the backward pass too."""
    importlib.import_module("timm.layers").set_fused_attn(False)  # timm of 2022 wrote attention out
    model = importlib.import_module("timm").create_model(name).train()
    images = _images(batch, pixels)
    if channels_last:
        for module in model.modules():
            for key, value in list(module._parameters.items()):
                if value is not None and value.dim() == 4:
                    module._parameters[key] = nn.Parameter(value.detach().to(memory_format=torch.channels_last))
        images["x"] = images["x"].to(memory_format=torch.channels_last)
    return Workload(
        model,
        images,
        _classify,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
        loop=Loop(holds_outputs="step", autocast_backward=True, scales_loss=False, cudnn_benchmark=True),
    )

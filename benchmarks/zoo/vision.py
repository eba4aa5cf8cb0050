"""Networks on images: convolutions, normalisation over the batch, in-place activations, patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from memfit import Workload


def images(batch: int, size: int, channels: int = 3, classes: int = 100) -> dict[str, Tensor]:
    """Return images and their classes."""
    return {"x": torch.randn(batch, channels, size, size), "y": torch.randint(0, classes, (batch,))}


def logits_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a transformers classifier."""
    return F.cross_entropy(model(pixel_values=batch["x"]).logits.float(), batch["y"])


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a module that returns logits."""
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def _vit() -> transformers.ViTForImageClassification:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=128,
        patch_size=8,
        num_labels=100,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config).train()


def vit() -> Workload:
    """A vision transformer with dropout, AdamW, clipped gradients."""
    torch.manual_seed(20)
    model = _vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, images(6, 128), logits_loss, optimizer, name="vit", max_grad_norm=1.0)


def vit_probe() -> Workload:
    """A frozen vision transformer but for its last two blocks and its head; SGD without momentum."""
    torch.manual_seed(21)
    model = _vit()
    model.requires_grad_(False)
    for part in (model.vit.layers[-2:], model.vit.layernorm, model.classifier):
        part.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return Workload(model, images(8, 128), logits_loss, optimizer, name="vit_probe")


def resnet50() -> Workload:
    """ResNet-50 (bottlenecks 3, 4, 6, 3; BatchNorm), SGD with momentum and weight decay."""
    torch.manual_seed(22)
    config = transformers.ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=100)
    model = transformers.ResNetForImageClassification(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return Workload(model, images(4, 128), logits_loss, optimizer, name="resnet50")


def convnext() -> Workload:
    """ConvNeXt: depthwise convolutions, LayerNorm over channels, layer scale, AdamW."""
    torch.manual_seed(23)
    config = transformers.ConvNextConfig(
        depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384], num_labels=100, drop_path_rate=0.1
    )
    model = transformers.ConvNextForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, images(4, 128), logits_loss, optimizer, name="convnext")


def swin() -> Workload:
    """Swin: attention in shifted windows, NAdam."""
    torch.manual_seed(24)
    config = transformers.SwinConfig(
        image_size=128,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=100,
    )
    model = transformers.SwinForImageClassification(config).train()
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-4)
    return Workload(model, images(8, 128), logits_loss, optimizer, name="swin")


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, filter each channel, project; activations in place."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        hidden = channels * expansion
        self.residual = stride == 1 and channels == out
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)),
            *(
                nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU6(inplace=True),
            ),
            *(nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def mobilenet() -> Workload:
    """MobileNetV2's blocks: depthwise convolutions, BatchNorm, ReLU6 in place, RMSprop with momentum."""
    torch.manual_seed(25)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
    widths = [(16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(80, 100))
    model = nn.Sequential(stem, *(InvertedResidual(*width) for width in widths), head)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    return Workload(model, images(12, 128), class_loss, optimizer, name="mobilenet")


def vgg() -> Workload:
    """VGG: plain convolutions, ReLU in place, dropout, large linear layers, SGD with Nesterov's momentum."""
    torch.manual_seed(26)
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 0, 64, 64, 0, 128, 128, 0, 256, 256, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    linear = [nn.Flatten(), nn.Linear(256 * 36, 1024), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Sequential(*linear, nn.Linear(1024, 100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    return Workload(model, images(8, 96), class_loss, optimizer, name="vgg", max_grad_norm=5.0)

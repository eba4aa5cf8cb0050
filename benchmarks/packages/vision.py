"""Vision models and losses of packages on PyPI, each trained as its README or its examples do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload


def _images(samples: int, size: int, classes: int = 10) -> dict[str, Tensor]:
    return {"x": torch.rand(samples, 3, size, size), "y": torch.randint(0, classes, (samples,))}


def _classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def vit_lion() -> Workload:
    """Return vit-pytorch's ViT by its README, trained by lion-pytorch's Lion."""
    from lion_pytorch import Lion
    from vit_pytorch import ViT

    torch.manual_seed(0)
    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 128, "depth": 3, "heads": 4, "mlp_dim": 256}
    model = ViT(**sizes, dropout=0.1, emb_dropout=0.1)
    return Workload(
        model=model,
        batch=_images(16, 64),
        loss_fn=_classified,
        optimizer=Lion(model.parameters(), lr=1e-4, weight_decay=1e-2),
    )


def packed_images() -> Workload:
    """Return vit-pytorch's NaViT, by its README: images of different sizes packed into rows."""
    from vit_pytorch.na_vit import NaViT

    torch.manual_seed(0)
    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 128, "depth": 3, "heads": 4, "mlp_dim": 256}
    model = NaViT(**sizes, dropout=0.1, emb_dropout=0.1, token_dropout_prob=0.1)
    rows = [[(64, 64), (32, 32)], [(32, 64), (64, 48)], [(16, 32)]]
    images = [[torch.randn(3, *size) for size in row] for row in rows]
    return Workload(
        model=model,
        batch={"images": images, "y": torch.randint(0, 10, (5,))},
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["images"]), batch["y"]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )


def diffusion() -> Workload:
    """Return denoising-diffusion-pytorch's model, whose loss draws a time step for each image."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    torch.manual_seed(0)
    unet = Unet(dim=16, dim_mults=(1, 2), flash_attn=True, attn_heads=2, attn_dim_head=16)
    model = GaussianDiffusion(unet, image_size=32, timesteps=100)
    return Workload(
        model=model,
        batch=torch.rand(4, 3, 32, 32),
        loss_fn=lambda model, images: model(images),
        optimizer=torch.optim.Adam(model.parameters(), lr=8e-5, betas=(0.9, 0.99)),
        max_grad_norm=1.0,
    )


def elucidated_diffusion() -> Workload:
    """Return denoising-diffusion-pytorch's elucidated model; by `random`, half of the steps condition on themselves."""
    from denoising_diffusion_pytorch import ElucidatedDiffusion, Unet

    torch.manual_seed(0)
    unet = Unet(
        dim=16, dim_mults=(1, 2), self_condition=True, learned_sinusoidal_cond=True, attn_heads=2, attn_dim_head=16
    )
    model = ElucidatedDiffusion(unet, image_size=32, num_sample_steps=8)
    return Workload(
        model=model,
        batch=torch.rand(4, 3, 32, 32),
        loss_fn=lambda model, images: model(images),
        optimizer=torch.optim.Adam(model.parameters(), lr=8e-5, betas=(0.9, 0.99)),
    )


def segmentation_unet() -> Workload:
    """Return segmentation-models-pytorch's U-Net with its Dice loss."""
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    model = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=4, decoder_channels=(32, 16, 16, 8, 8))
    loss_fn = smp.losses.DiceLoss(mode="multiclass", from_logits=True)
    return Workload(
        model=model,
        batch={"image": torch.rand(2, 3, 64, 64), "mask": torch.randint(0, 4, (2, 64, 64))},
        loss_fn=lambda model, batch: loss_fn(model(batch["image"]), batch["mask"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-4),
    )


def segmentation_lovasz() -> Workload:
    """Return segmentation-models-pytorch's FPN with its Lovász and focal losses, which select by the labels."""
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    model = smp.FPN("timm-mobilenetv3_small_075", encoder_weights=None, classes=1)
    lovasz, focal = smp.losses.LovaszLoss(mode="binary"), smp.losses.FocalLoss(mode="binary")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["image"])
        total: Tensor = lovasz(logits, batch["mask"]) + focal(logits, batch["mask"])
        return total

    return Workload(
        model=model,
        batch={"image": torch.rand(4, 3, 64, 64), "mask": torch.randint(0, 2, (4, 1, 64, 64)).float()},
        loss_fn=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-4),
    )


def timm_mixup() -> Workload:
    """Return a timm network with stochastic depth, its Mixup, its loss of soft targets and its optimizer."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2

    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.2, dims=(24, 48, 96, 192))
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, label_smoothing=0.1, num_classes=10)
    train_loss = SoftTargetCrossEntropy()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        images, targets = mixup(batch["x"].clone(), batch["y"])
        mean: Tensor = train_loss(model(images), targets)
        return mean

    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    return Workload(model=model, batch=_images(8, 64), loss_fn=loss, optimizer=optimizer)


def perceiver() -> Workload:
    """Return perceiver-pytorch's Perceiver, whose layers share weights, by its README."""
    from perceiver_pytorch import Perceiver

    torch.manual_seed(0)
    sizes = {"num_latents": 64, "latent_dim": 128, "latent_heads": 4, "latent_dim_head": 32, "cross_dim_head": 32}
    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=6, max_freq=10.0, depth=3, num_classes=10,
        weight_tie_layers=True, self_per_cross_attn=2, **sizes,
    )  # fmt: skip
    return Workload(
        model=model,
        batch={"x": torch.randn(4, 32, 32, 3), "y": torch.randint(0, 10, (4,))},
        loss_fn=_classified,
        optimizer=torch.optim.AdamW(model.parameters()),
    )


def kornia_augmented() -> Workload:
    """Return a network whose step augments its images by kornia and whose loss is kornia's focal loss."""
    import kornia.augmentation as augmentation
    from kornia.losses import FocalLoss

    torch.manual_seed(0)
    augmented = augmentation.AugmentationSequential(
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.RandomAffine(degrees=15.0, p=0.5),
        augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8),
        data_keys=["input"],
    )
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    focal = FocalLoss(alpha=0.5, gamma=2.0, reduction="mean")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            images = augmented(batch["x"])
        mean: Tensor = focal(model(images), batch["y"])
        return mean

    return Workload(
        model=model, batch=_images(8, 48), loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )

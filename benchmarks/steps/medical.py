"""MONAI's networks that the first zoo does not have, on volumes and images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from monai.losses import BendingEnergyLoss, DiceLoss, PatchAdversarialLoss
from monai.networks import nets
from monai.networks.blocks import Warp
from torch import Tensor, nn

from benchmarks.steps.data import class_loss, seed_all
from memfit import Workload

_CLASSES = 3


def _volumes(batch: int, *shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 1, *shape), "y": torch.randint(0, _CLASSES, (batch, *shape))}


def _dice_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the Dice loss, with a small part of the cross-entropy."""
    logits = model(batch["x"])
    dice: Tensor = DiceLoss(to_onehot_y=True, softmax=True)(logits, batch["y"][:, None])
    return dice + 0.1 * F.cross_entropy(logits, batch["y"])


def attention_unet() -> Workload:
    """AttentionUnet: gates on the connections between encoder and decoder."""
    seed_all(280)
    model = nets.AttentionUnet(3, 1, _CLASSES, channels=(8, 16, 32), strides=(2, 2), dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, _volumes(1, 24, 24, 24), _dice_loss, optimizer, name="attention_unet")


def vnet() -> Workload:
    """VNet: residual stages with ELU in place, dropout of channels."""
    seed_all(281)
    model = nets.VNet(2, 1, _CLASSES, dropout_prob_down=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, _volumes(2, 32, 32), _voxel_loss, optimizer, name="vnet")


def _voxel_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def basic_unet() -> Workload:
    """BasicUNet in two dimensions, with instance norm, and AdamW."""
    seed_all(282)
    model = nets.BasicUNet(2, 1, _CLASSES, features=(16, 16, 32, 64, 64, 16), dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, _volumes(4, 64, 64), _dice_loss, optimizer, name="basic_unet")


def high_res_net() -> Workload:
    """HighResNet: dilated convolutions at full resolution, with BatchNorm."""
    seed_all(283)
    model = nets.HighResNet(3, 1, _CLASSES, dropout_prob=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, _volumes(1, 12, 12, 16), _dice_loss, optimizer, name="high_res_net")


def monai_autoencoder() -> Workload:
    """AutoEncoder with residual units: images encoded and drawn again."""
    seed_all(284)
    model = nets.AutoEncoder(2, 1, 1, channels=(16, 32, 64), strides=(2, 2, 2), num_res_units=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, torch.rand(16, 1, 96, 96), _drawn_again, optimizer, name="monai_autoencoder")


def _drawn_again(model: nn.Module, images: Tensor) -> Tensor:
    return F.l1_loss(model(images), images)


def var_autoencoder() -> Workload:
    """VarAutoEncoder: a mean and a deviation, a sample of them, and linear layers between."""
    seed_all(285)
    model = nets.VarAutoEncoder(2, (1, 32, 32), 1, latent_size=16, channels=(16, 32, 64), strides=(1, 2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, torch.rand(16, 1, 32, 32), _variational_loss, optimizer, name="var_autoencoder")


def _variational_loss(model: nn.Module, images: Tensor) -> Tensor:
    drawn, mean, log_variance, _ = model(images)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    loss: Tensor = F.binary_cross_entropy_with_logits(drawn, images, reduction="sum") / len(images) + divergence
    return loss


def deep_segresnet() -> Workload:
    """SegResNetDS: outputs at several resolutions, each with its loss."""
    seed_all(286)
    model = nets.SegResNetDS(
        spatial_dims=2, init_filters=16, in_channels=1, out_channels=_CLASSES, blocks_down=(1, 1, 1), dsdepth=2
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model.train(), _volumes(4, 64, 64), _deep_loss, optimizer, name="deep_segresnet")


def _deep_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = []
    for depth, logits in enumerate(model(batch["x"])):
        labels = F.interpolate(batch["y"][:, None].float(), logits.shape[2:], mode="nearest").long()
        losses.append(DiceLoss(to_onehot_y=True, softmax=True)(logits, labels) / 2**depth)
    return torch.stack(losses).sum()


def registration() -> Workload:
    """RegUNet: a field of displacements that brings one volume onto another, and its bending energy."""
    seed_all(290)
    model = nets.RegUNet(3, 2, 8, depth=2, out_channels=3, out_kernel_initializer="zeros")
    batch = {"moving": torch.rand(1, 1, 24, 24, 24), "fixed": torch.rand(1, 1, 24, 24, 24)}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Workload(model, batch, _registration_loss, optimizer, name="registration")


def _registration_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    field = model(torch.cat([batch["moving"], batch["fixed"]], 1))
    warped = Warp("bilinear", "border")(batch["moving"], field)
    loss: Tensor = F.mse_loss(warped, batch["fixed"]) + 0.1 * BendingEnergyLoss()(field)
    return loss


class Adversaries(nn.Module):
    """A variational autoencoder with a Kullback-Leibler term, and a discriminator of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.drawing = nets.AutoencoderKL(
            2, 1, 1, channels=(16, 32), attention_levels=(False, False), latent_channels=4, num_res_blocks=(1, 1),
            norm_num_groups=8, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False,
        )  # fmt: skip
        self.judging = nets.PatchDiscriminator(2, 16, 1, num_layers_d=2)


def _adversarial_loss(model: Adversaries, images: Tensor) -> Tensor:
    """Return the losses of both: the discriminator sees drawings without gradients to the autoencoder."""
    drawn, mean, deviation = model.drawing(images)
    against = PatchAdversarialLoss(criterion="least_squares")
    for parameter in model.judging.parameters():
        parameter.requires_grad_(False)
    fooled = against(model.judging(drawn)[-1], target_is_real=True, for_discriminator=False)
    for parameter in model.judging.parameters():
        parameter.requires_grad_(True)
    judged = against(model.judging(drawn.detach())[-1], target_is_real=False, for_discriminator=True)
    judged = judged + against(model.judging(images)[-1], target_is_real=True, for_discriminator=True)
    divergence = 0.5 * (mean.square() + deviation.square() - deviation.square().log() - 1).mean()
    loss: Tensor = F.l1_loss(drawn, images) + 1e-3 * divergence + 0.05 * fooled + 0.5 * judged
    return loss


def latent_autoencoder() -> Workload:
    """AutoencoderKL with a PatchDiscriminator, both losses in one step, weights frozen in between."""
    seed_all(287)
    model = Adversaries()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Workload(model, torch.rand(3, 1, 48, 48), _adversarial_loss, optimizer, name="latent_autoencoder")  # type: ignore[arg-type]


def vqvae() -> Workload:
    """MONAI's VQVAE: codes of the nearest, updated as running means while it is called."""
    seed_all(288)
    model = nets.VQVAE(
        2, 1, 1, channels=(16, 32), num_res_layers=1, num_res_channels=(16, 32), num_embeddings=64, embedding_dim=16,
        downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)), upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model.train(), torch.rand(16, 1, 64, 64), _quantized_loss, optimizer, name="vqvae")


def _quantized_loss(model: nn.Module, images: Tensor) -> Tensor:
    drawn, quantization = model(images)
    loss: Tensor = F.l1_loss(drawn, images) + quantization
    return loss


def densenet() -> Workload:
    """DenseNet in two dimensions: each layer sees all before it."""
    seed_all(289)
    model = nets.DenseNet(2, 1, 5, init_features=16, growth_rate=8, block_config=(3, 3, 3), dropout_prob=0.1)
    batch = {"x": torch.randn(12, 1, 80, 80), "y": torch.randint(0, 5, (12,))}
    return Workload(model, batch, class_loss, torch.optim.Adam(model.parameters(), lr=1e-3), name="densenet")

"""Networks of MONAI on volumes. It is imported where a network is made: that takes seconds, and few steps need it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload

CLASSES = 4


def volumes(batch: int, *shape: int, channels: int = 1) -> dict[str, Tensor]:
    """Return volumes and a class for each voxel."""
    return {"x": torch.randn(batch, channels, *shape), "y": torch.randint(0, CLASSES, (batch, *shape))}


def voxel_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the voxels, and their number."""
    return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), batch["y"].numel()


def dice_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return Dice and cross-entropy, a mean over the samples."""
    from monai.losses import DiceCELoss

    loss: Tensor = DiceCELoss(to_onehot_y=True, softmax=True)(model(batch["x"]).float(), batch["y"][:, None])
    return loss


def deep_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of every output of a deeply supervised network, halved from one to the next."""
    outputs = model(batch["x"]).unbind(1)
    losses = [F.cross_entropy(output.float(), batch["y"]) / 2**depth for depth, output in enumerate(outputs)]
    return torch.stack(losses).sum()


def monai_unet() -> Workload:
    """MONAI's 3-D UNet with residual units, instance norm and PReLU, Adam."""
    from monai.networks import nets

    torch.manual_seed(30)
    model = nets.UNet(3, 1, CLASSES, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, volumes(2, 64, 64, 64), voxel_loss, optimizer, name="monai_unet")


def dynunet() -> Workload:
    """MONAI's DynUNet (nnU-Net): deep supervision, instance norm, leaky ReLU in place, SGD with Nesterov's momentum."""
    from monai.networks import nets

    torch.manual_seed(31)
    model = nets.DynUNet(
        3,
        1,
        CLASSES,
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[12, 24, 48, 96],
        deep_supervision=True,
        deep_supr_num=2,
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    return Workload(model, volumes(2, 48, 48, 48), deep_loss, optimizer, name="dynunet", max_grad_norm=12.0)


def segresnet() -> Workload:
    """MONAI's SegResNet: group norm, ReLU in place, dropout, interpolation; AdamW."""
    from monai.networks import nets

    torch.manual_seed(32)
    model = nets.SegResNet(3, init_filters=8, in_channels=4, out_channels=CLASSES, dropout_prob=0.2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-5)
    return Workload(model, volumes(2, 48, 48, 48, channels=4), dice_loss, optimizer, name="segresnet")


def swin_unetr() -> Workload:
    """MONAI's SwinUNETR: attention in windows of a volume, convolutions around it, AdamW."""
    from monai.networks import nets

    torch.manual_seed(33)
    model = nets.SwinUNETR(
        in_channels=1, out_channels=CLASSES, feature_size=12, depths=(1, 1, 1, 1), window_size=4
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, volumes(1, 32, 64, 96), dice_loss, optimizer, name="swin_unetr", max_grad_norm=1.0)


def unetr() -> Workload:
    """MONAI's UNETR: a transformer over patches of a volume, BatchNorm in the decoder, Adam with AMSGrad."""
    from monai.networks import nets

    torch.manual_seed(34)
    model = nets.UNETR(
        1, CLASSES, (64, 64, 64), feature_size=8, hidden_size=192, mlp_dim=768, num_heads=6, norm_name="batch"
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, amsgrad=True)
    return Workload(model, volumes(1, 64, 64, 64), dice_loss, optimizer, name="unetr")

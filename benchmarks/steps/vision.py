"""Networks on images of transformers: classification, masked images, segmentation, detection with their own losses."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.steps.data import own_loss, seed_all
from memfit import Workload

_SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "image_size": 64,
    "patch_size": 8,
}


def _workload(
    name: str, model: nn.Module, batch: dict[str, Any], optimizer: Any = None, norm: float | None = None
) -> Workload:
    """Return the training of a model by its own loss, with AdamW unless another optimizer is given."""
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model.train(), batch, own_loss, chosen, name=name, max_grad_norm=norm)


def _labelled(batch: int, size: int, classes: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def _mapped(batch: int, size: int, classes: int) -> dict[str, Tensor]:
    """Return images and a class for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch, size, size))}


def deit() -> Workload:
    """DeiT: a vision transformer with a token for distillation, dropout, clipped gradients."""
    seed_all(240)
    config = transformers.DeiTConfig(**_SIZES, hidden_dropout_prob=0.1, num_labels=20)
    return _workload("deit", transformers.DeiTForImageClassification(config), _labelled(12, 64, 20), norm=1.0)


def beit() -> Workload:
    """BEiT: relative positions in each layer, layer scale, paths dropped."""
    seed_all(241)
    config = transformers.BeitConfig(
        **_SIZES, num_labels=20, use_relative_position_bias=True, drop_path_rate=0.2, layer_scale_init_value=0.1
    )
    return _workload("beit", transformers.BeitForImageClassification(config), _labelled(12, 64, 20))


def vit_mae() -> Workload:
    """A masked autoencoder: three quarters of the patches are drawn away, and drawn by a decoder."""
    seed_all(242)
    config = transformers.ViTMAEConfig(
        **_SIZES,
        decoder_hidden_size=64,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=256,
        norm_pix_loss=True,
    )
    batch = {"pixel_values": torch.randn(24, 3, 64, 64)}
    return _workload("vit_mae", transformers.ViTMAEForPreTraining(config), batch)


def dinov2() -> Workload:
    """DINOv2: SwiGLU, layer scale, a linear head on frozen features and two trained blocks."""
    seed_all(243)
    sizes = {name: size for name, size in _SIZES.items() if name != "intermediate_size"}
    config = transformers.Dinov2Config(**sizes, num_labels=20, use_swiglu_ffn=True, drop_path_rate=0.1)
    model = transformers.Dinov2ForImageClassification(config)
    model.dinov2.requires_grad_(False)
    model.dinov2.layernorm.requires_grad_(True)
    for name, parameter in model.dinov2.named_parameters():
        if ".2." in name or ".3." in name:
            parameter.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    return _workload("dinov2", model, _labelled(16, 64, 20), torch.optim.AdamW(trained, lr=1e-4))


def segformer() -> Workload:
    """SegFormer: attention on smaller keys at four scales, the loss on the labels' size."""
    seed_all(244)
    config = transformers.SegformerConfig(
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=64,
        num_labels=8,
    )
    return _workload("segformer", transformers.SegformerForSemanticSegmentation(config), _mapped(4, 96, 8))


def efficientnet() -> Workload:
    """EfficientNet: depthwise convolutions, squeeze and excitation, RMSprop."""
    seed_all(245)
    config = transformers.EfficientNetConfig(
        image_size=64,
        width_coefficient=0.5,
        depth_coefficient=0.5,
        hidden_dim=640,
        num_labels=20,
    )
    model = transformers.EfficientNetForImageClassification(config)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    return _workload("efficientnet", model, _labelled(8, 64, 20), optimizer)


def focalnet() -> Workload:
    """FocalNet: modulation by convolutions in the place of attention, paths dropped."""
    seed_all(246)
    config = transformers.FocalNetConfig(
        image_size=64, embed_dim=32, depths=[1, 1, 2], focal_levels=[2, 2, 2], focal_windows=[3, 3, 3], num_labels=20
    )
    config.drop_path_rate = 0.1
    return _workload("focalnet", transformers.FocalNetForImageClassification(config), _labelled(6, 64, 20))


def swinv2() -> Workload:
    """Swin v2: cosine attention in shifted windows, positions from a small network; masked images."""
    seed_all(247)
    config = transformers.Swinv2Config(
        image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, encoder_stride=8
    )
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "bool_masked_pos": torch.rand(8, 256) < 0.5}
    return _workload("swinv2", transformers.Swinv2ForMaskedImageModeling(config), batch)


def videomae() -> Workload:
    """VideoMAE on clips: tubes of patches are masked, by a mask of the batch, and drawn again."""
    seed_all(248)
    config = transformers.VideoMAEConfig(
        **{**_SIZES, "image_size": 32},
        num_frames=8,
        tubelet_size=2,
        decoder_num_hidden_layers=2,
        decoder_hidden_size=64,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=256,
    )
    masked = torch.zeros(12, 64, dtype=torch.bool)
    for row in masked:
        row[torch.randperm(64)[:48]] = True
    batch = {"pixel_values": torch.randn(12, 8, 3, 32, 32), "bool_masked_pos": masked}
    return _workload("videomae", transformers.VideoMAEForPreTraining(config), batch)


def _objects(batch: int, size: int, classes: int, most: int = 5) -> list[dict[str, Tensor]]:
    """Return the boxes (centre, width, height) and the classes of each image, of which it has one or more."""
    found = []
    for _ in range(batch):
        count = int(torch.randint(1, most + 1, ()))
        sides = 0.1 + 0.3 * torch.rand(count, 2)
        centres = sides / 2 + torch.rand(count, 2) * (1 - sides)
        boxes = torch.cat([centres, sides], 1)
        found.append({"class_labels": torch.randint(0, classes, (count,)), "boxes": boxes})
    return found


def _detection_loss(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Return the loss of images with objects, one item for each, as a dataset yields them."""
    pixels = torch.stack([item["pixel_values"] for item in batch])
    labels = [{name: t for name, t in item.items() if name != "pixel_values"} for item in batch]
    loss: Tensor = model(pixel_values=pixels, labels=labels).loss
    return loss


def _detector(name: str, model: nn.Module, batch: int, size: int, classes: int) -> Workload:
    items = [{"pixel_values": torch.randn(3, size, size), **objects} for objects in _objects(batch, size, classes)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model.train(), items, _detection_loss, optimizer, name=name, max_grad_norm=0.1)


def _backbone() -> Any:
    return transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )


def detr() -> Workload:
    """DETR: a set of boxes matched with the truth by the Hungarian method, losses at each decoder layer."""
    seed_all(249)
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=_backbone(),
        num_labels=6,
        num_queries=12,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        auxiliary_loss=True,
    )
    return _detector("detr", transformers.DetrForObjectDetection(config), 4, 128, 6)


def yolos() -> Workload:
    """YOLOS: a vision transformer with tokens that become boxes, matched by the Hungarian method."""
    seed_all(250)
    config = transformers.YolosConfig(
        **{**_SIZES, "image_size": [96, 96]}, num_detection_tokens=12, num_labels=6, use_mid_position_embeddings=False
    )
    return _detector("yolos", transformers.YolosForObjectDetection(config), 4, 96, 6)


def deformable_detr() -> Workload:
    """Deformable DETR: attention to sampled places at several scales, boxes refined from layer to layer."""
    seed_all(251)
    backbone = _backbone()
    backbone.out_features = ["stage2", "stage3", "stage4"]
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        num_labels=6,
        num_queries=12,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_feature_levels=3,
        with_box_refine=True,
        auxiliary_loss=True,
    )
    return _detector("deformable_detr", transformers.DeformableDetrForObjectDetection(config), 3, 128, 6)


def _mask_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(
        pixel_values=batch["pixel_values"],
        mask_labels=list(batch["mask_labels"]),
        class_labels=list(batch["class_labels"]),
    ).loss
    return loss


def mask2former() -> Workload:
    """Mask2Former: masks as a set, matched on points drawn at random, with uncertain points counted more."""
    seed_all(252)
    backbone = transformers.SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=10,
        num_labels=5,
        train_num_points=256,
    )
    model = transformers.Mask2FormerForUniversalSegmentation(config).train()
    masks = (torch.rand(2, 3, 64, 64) < 0.3).float()
    batch = {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "mask_labels": masks,
        "class_labels": torch.randint(0, 5, (2, 3)),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, batch, _mask_loss, optimizer, name="mask2former", max_grad_norm=0.01)

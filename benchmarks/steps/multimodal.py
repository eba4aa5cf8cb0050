"""Models of images and text of transformers, from configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.steps.data import VOCABULARY, own_loss, seed_all, tokens
from memfit import Workload

_TEXT = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 80,
}
_VISION = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "image_size": 64,
    "patch_size": 8,
}


def _workload(name: str, model: nn.Module, batch: dict[str, Any], norm: float | None = None) -> Workload:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return Workload(model.train(), batch, own_loss, optimizer, name=name, max_grad_norm=norm)


def _pixels(batch: int) -> Tensor:
    return torch.randn(batch, 3, 64, 64)


def _contrastive_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def clip() -> Workload:
    """CLIP: two encoders, and each pair of a batch against all others."""
    seed_all(270)
    config = transformers.CLIPConfig(text_config={**_TEXT, "eos_token_id": 2}, vision_config=_VISION, projection_dim=64)
    model = transformers.CLIPModel(config).train()
    ids = tokens(16, 32)
    ids[:, -1] = 2
    batch = {"input_ids": ids, "pixel_values": _pixels(16)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    return Workload(model, batch, _contrastive_loss, optimizer, name="clip", max_grad_norm=1.0)


def siglip() -> Workload:
    """SigLIP: each pair by itself is or is not one, with attention pooling."""
    seed_all(271)
    config = transformers.SiglipConfig(text_config={**_TEXT, "projection_size": 96}, vision_config=_VISION)
    model = transformers.SiglipModel(config).train()
    batch = {"input_ids": tokens(16, 32), "pixel_values": _pixels(16)}
    return Workload(model, batch, _contrastive_loss, torch.optim.Adafactor(model.parameters(), lr=1e-3), name="siglip")


def blip() -> Workload:
    """BLIP: a caption, decoded with attention to the image."""
    seed_all(272)
    text = {**_TEXT, "projection_dim": 64, "encoder_hidden_size": 96, "bos_token_id": 1, "sep_token_id": 2}
    config = transformers.BlipConfig(text_config=text, vision_config=_VISION, projection_dim=64)
    ids = tokens(8, 32)
    batch = {"pixel_values": _pixels(8), "input_ids": ids, "labels": ids}
    return _workload("blip", transformers.BlipForConditionalGeneration(config), batch)


def vilt() -> Workload:
    """ViLT: words and patches in one encoder; the patches that a mask leaves are drawn by a multinomial."""
    seed_all(273)
    config = transformers.ViltConfig(**{**_VISION, **_TEXT}, num_labels=10, max_image_length=40)
    batch = {
        "input_ids": tokens(6, 24),
        "pixel_values": _pixels(6),
        "pixel_mask": torch.ones(6, 64, 64, dtype=torch.long),
        "labels": torch.rand(6, 10),
    }
    return _workload("vilt", transformers.ViltForQuestionAnswering(config), batch)


def llava() -> Workload:
    """LLaVA: a frozen vision tower, whose features take the places of image tokens in Llama's input."""
    seed_all(274)
    text = transformers.LlamaConfig(**_TEXT, num_key_value_heads=2, use_cache=False)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=64),
        text_config=text,
        image_token_id=1,
        image_seq_length=64,
        vision_feature_layer=-2,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    ids = torch.cat([torch.ones(4, 64, dtype=torch.long), tokens(4, 16)], 1)
    batch = {"input_ids": ids, "pixel_values": _pixels(4), "labels": ids.masked_fill(ids == 1, -100)}
    return _workload("llava", model, batch, norm=1.0)


def image_captioner() -> Workload:
    """A vision transformer and GPT-2 with cross attention, put together by `VisionEncoderDecoderModel`."""
    seed_all(275)
    encoder = transformers.ViTConfig(**_VISION)
    decoder = transformers.GPT2Config(
        n_embd=96,
        n_layer=3,
        n_head=4,
        n_positions=64,
        vocab_size=VOCABULARY,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    batch = {"pixel_values": _pixels(6), "labels": tokens(6, 40)}
    return _workload("image_captioner", transformers.VisionEncoderDecoderModel(config), batch)


def layoutlmv3() -> Workload:
    """LayoutLMv3: words, their boxes on a page, and its patches; a class for each word."""
    seed_all(276)
    config = transformers.LayoutLMv3Config(
        **{**_TEXT, "max_position_embeddings": 130},
        input_size=64,
        patch_size=8,
        coordinate_size=16,
        shape_size=16,
        num_labels=7,
        pad_token_id=0,
        max_2d_position_embeddings=128,
    )
    corners = torch.randint(0, 60, (6, 48, 2))
    boxes = torch.cat([corners, corners + torch.randint(1, 60, (6, 48, 2))], -1)
    batch = {
        "input_ids": tokens(6, 48),
        "bbox": boxes,
        "pixel_values": _pixels(6),
        "labels": torch.randint(0, 7, (6, 48)),
    }
    return _workload("layoutlmv3", transformers.LayoutLMv3ForTokenClassification(config), batch)

"""The training steps that the frontier is measured on.

Real architectures from public packages, at sizes where the plain step takes about a second on two threads and
activations are most of its peak: what a method can save is a share of those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.zoo.language import VOCABULARY, next_token_loss, padded, summed_loss, tokens
from benchmarks.zoo.medical import CLASSES, volumes, voxel_loss
from benchmarks.zoo.vision import images, logits_loss
from memfit import Workload


@dataclass(frozen=True)
class Subject:
    """A training step, and where a user of checkpointing would cut its model.

    Attributes:
        make: Makes the workload, the same every time.
        chains: Blocks that are called one after the other, by FQN; each chain lies in one list of its model.
        levels: Modules that hold several blocks each, where the model is not a chain: what is checkpointed as segments.
        note: What is to be known of the step, for the page.
    """

    make: Callable[[], Workload]
    chains: tuple[tuple[str, ...], ...]
    levels: tuple[str, ...] = ()
    note: str = ""

    @property
    def blocks(self) -> list[str]:
        """Every block, in order."""
        return [fqn for chain in self.chains for fqn in chain]


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{index}" for index in range(count))


def gpt(layers: int = 12, width: int = 768, length: int = 512, batch: int = 2) -> Workload:
    """GPT-2 with its dropout and a tied head; SGD, so that the optimizer's state does not hide the activations."""
    torch.manual_seed(50)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        n_positions=length,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, tokens(batch, length), next_token_loss, optimizer, name="gpt", max_grad_norm=1.0)


def bert(layers: int = 12, width: int = 256, length: int = 256, batch: int = 8) -> Workload:
    """BERT, masked language modelling of padded rows: a summed loss and its count, AdamW."""
    torch.manual_seed(51)
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
    )
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, padded(batch, length, labelled=0.15), summed_loss, optimizer, name="bert")


def unet(size: int = 96, batch: int = 2) -> Workload:
    """MONAI's 3-D UNet with residual units, instance norm, PReLU and dropout; Adam."""
    from monai.networks.nets import UNet  # seconds, which other steps need not take

    torch.manual_seed(52)
    model = UNet(3, 1, CLASSES, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Workload(model, volumes(batch, size, size, size), voxel_loss, optimizer, name="unet")


def resnet50(size: int = 96, batch: int = 32) -> Workload:
    """ResNet-50 with BatchNorm; SGD."""
    torch.manual_seed(53)
    config = transformers.ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=100)
    model = transformers.ResNetForImageClassification(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    return Workload(model, images(batch, size), logits_loss, optimizer, name="resnet50")


def vit(layers: int = 12, width: int = 192, size: int = 128, batch: int = 8) -> Workload:
    """A vision transformer (Tiny) on 256 patches with dropout; AdamW, clipped gradients."""
    torch.manual_seed(54)
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=8,
        num_labels=100,
        hidden_dropout_prob=0.1,
    )
    model = transformers.ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, images(batch, size), logits_loss, optimizer, name="vit", max_grad_norm=1.0)


def moe(layers: int = 6, width: int = 256, length: int = 256, batch: int = 8) -> Workload:
    """A Mixtral-like mixture of 4 experts, 2 for each token; SGD."""
    torch.manual_seed(55)
    config = transformers.MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    model = transformers.MixtralForCausalLM(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, tokens(batch, length), next_token_loss, optimizer, name="moe", max_grad_norm=1.0)


def llama(layers: int = 8, width: int = 256, length: int = 256, batch: int = 8) -> Workload:
    """A Llama-like model with grouped queries: 2 heads of keys and values for 8; AdamW."""
    torch.manual_seed(57)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Workload(model, tokens(batch, length), next_token_loss, optimizer, name="llama", max_grad_norm=1.0)


def diffusion(size: int = 32, batch: int = 4) -> Workload:
    """MONAI's diffusion U-Net with attention at two levels, trained to predict the noise of images; AdamW."""
    from monai.networks.nets import DiffusionModelUNet  # seconds, which other steps need not take

    torch.manual_seed(58)
    model = DiffusionModelUNet(
        *(2, 3, 3),
        channels=(64, 128, 256),
        attention_levels=(False, True, True),
        num_res_blocks=2,
        num_head_channels=64,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noise, noisy = torch.randn(2, batch, 3, size, size)
    return Workload(model, (noisy, torch.randint(0, 1000, (batch,)), noise), _noise_loss, optimizer, name="diffusion")


def _noise_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    noisy, times, noise = batch
    return F.mse_loss(model(noisy, timesteps=times), noise)


class RecurrentLayer(nn.Module):
    """One LSTM, dropout, and a normalised residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        normalised: Tensor = self.norm(x + self.dropout(hidden))
        return normalised


class RecurrentStack(nn.Module):
    """Embedding, layers of LSTMs, and a head tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(RecurrentLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def lstm(layers: int = 8, width: int = 256, length: int = 128, batch: int = 32) -> Workload:
    """A stack of LSTMs with residuals over characters; SGD with momentum, clipped gradients."""
    torch.manual_seed(56)
    model = RecurrentStack(256, width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch_of_ids = torch.randint(0, 256, (batch, length + 1))
    return Workload(model, batch_of_ids, _character_loss, optimizer, name="lstm", max_grad_norm=1.0)


def _character_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


_UNET_LEVELS = ("model.1", "model.1.submodule.1", "model.1.submodule.1.submodule.1")
_UNET_BLOCKS = (
    *("model.0", "model.1.submodule.0", "model.1.submodule.1.submodule.0"),
    "model.1.submodule.1.submodule.1.submodule",
    *("model.1.submodule.1.submodule.2", "model.1.submodule.2", "model.2"),
)
_RESNET_STAGES = tuple(
    _numbered(f"resnet.encoder.stages.{stage}.layers", count) for stage, count in enumerate((3, 4, 6, 3))
)

_DIFFUSION_BLOCKS = (
    *(f"down_blocks.{level}.resnets.{block}" for level in range(3) for block in range(2)),
    *("middle_block.resnet_1", "middle_block.attention", "middle_block.resnet_2"),
    *(f"up_blocks.{level}.resnets.{block}" for level in range(3) for block in range(3)),
)

SUBJECTS: dict[str, Subject] = {
    "gpt": Subject(gpt, (_numbered("transformer.h", 12),), note="GPT-2, 12 layers, d = 768, 2 x 512 tokens; SGD"),
    "bert": Subject(
        bert, (_numbered("bert.encoder.layer", 12),), note="BERT, 12 layers, d = 256, 8 padded rows of 256; AdamW"
    ),
    "unet": Subject(
        unet,
        tuple((block,) for block in _UNET_BLOCKS),
        _UNET_LEVELS[:2],
        "MONAI's 3-D UNet with residual units, 2 volumes of 96³; Adam",
    ),
    "resnet50": Subject(resnet50, _RESNET_STAGES, note="ResNet-50 with BatchNorm, 32 images of 96²; SGD"),
    "vit": Subject(vit, (_numbered("vit.layers", 12),), note="ViT-Tiny, 12 layers, 8 images of 256 patches; AdamW"),
    "moe": Subject(
        moe, (_numbered("model.layers", 6),), note="Mixtral-like, 6 layers, d = 256, 4 experts, 8 x 256 tokens; SGD"
    ),
    "lstm": Subject(lstm, (_numbered("layers", 8),), note="8 LSTMs with residuals, d = 256, 32 x 128 characters; SGD"),
    "llama": Subject(
        llama, (_numbered("model.layers", 8),), note="Llama-like with GQA, 8 layers, d = 256, 8 x 256 tokens; AdamW"
    ),
    "diffusion": Subject(
        diffusion,
        tuple((block,) for block in _DIFFUSION_BLOCKS),
        (*_numbered("down_blocks", 3), "middle_block", *_numbered("up_blocks", 3)),
        "MONAI's diffusion U-Net with attention at two levels, 4 images of 32²; AdamW",
    ),
}
"""Each by its name."""

QUICK: dict[str, Subject] = {
    "gpt": Subject(
        functools.partial(gpt, layers=4, width=128, length=128, batch=4),
        (_numbered("transformer.h", 4),),
        note="GPT-2, 4 layers, d = 128, 4 x 128 tokens; SGD",
    ),
    "lstm": Subject(
        functools.partial(lstm, layers=4, width=128, length=64, batch=16),
        (_numbered("layers", 4),),
        note="4 LSTMs with residuals, d = 128, 16 x 64 characters; SGD",
    ),
}
"""Smaller ones, for `--quick`."""

"""The workloads of the claims page: ResNet-50, BERT-large, stacks of equal layers, GPTs and 3-D U-Nets.

Built under fake tensors (`claims_predicted.fake`) they take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit import Workload


def resnet50(batch_size: int, pixels: int, depths: Sequence[int] = (3, 4, 6, 3)) -> Workload:
    """transformers' ResNet-50 (v1.5, 25.6 M parameters, 1000 classes), or one of other depths; SGD with momentum."""
    config = transformers.ResNetConfig(num_labels=1000, depths=list(depths))
    return _images(transformers.ResNetForImageClassification(config), batch_size, pixels, "resnet")


def efficientnet(batch_size: int, pixels: int, width: float, depth: float, top: int, dropout: float) -> Workload:
    """transformers' EfficientNet (1000 classes), SGD with momentum.

    Args:
        batch_size: Images.
        pixels: Of their sides.
        width: Multiplies the channels of EfficientNet-B0.
        depth: Multiplies its layers.
        top: Channels of the last layer.
        dropout: Before the classifier.
    """
    config = transformers.EfficientNetConfig(
        num_labels=1000,
        image_size=pixels,
        width_coefficient=width,
        depth_coefficient=depth,
        hidden_dim=top,
        dropout_rate=dropout,
    )
    return _images(transformers.EfficientNetForImageClassification(config), batch_size, pixels, "efficientnet")


def _images(model: nn.Module, batch_size: int, pixels: int, name: str) -> Workload:
    batch = {"x": torch.randn(batch_size, 3, pixels, pixels), "y": torch.randint(1000, (batch_size,))}
    return Workload(model.train(), batch, _classify, _sgd(model), name=name)


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).logits, batch["y"])


def bert(
    batch_size: int, length: int, *, attention: str, width: int = 1024, layers: int = 24, vocabulary: int = 30522
) -> Workload:
    """transformers' BERT for masked language modelling, BERT-large unless made smaller, AdamW."""
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        attn_implementation=attention,
    )
    model = transformers.BertForMaskedLM(config).train()
    model.loss_type = "ForMaskedLM"
    batch = {"tokens": torch.randint(config.vocab_size, (batch_size, length))}
    return Workload(model, batch, _language, torch.optim.AdamW(model.parameters()), name="bert")


def gpt2(batch_size: int, length: int, *, width: int = 768, layers: int = 12, vocabulary: int = 50257) -> Workload:
    """transformers' GPT-2, of the smallest published size unless made smaller, without dropout, AdamW."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    batch = {"tokens": torch.randint(config.vocab_size, (batch_size, length))}
    return Workload(model, batch, _language, torch.optim.AdamW(model.parameters()), name="gpt2")


def _language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["tokens"]).loss
    return loss


class Layer(nn.Module):
    """A linear layer and its activation: what it keeps is as large as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return F.relu(y)


class Block(nn.Module):
    """A pre-norm Transformer block: what it keeps is many times its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


def layers(depth: int, sizes: Sequence[int], *, rows: int, width: int) -> Workload:
    """A chain of `depth` equal linear layers, SGD; `sizes` as in `grouped`."""
    model = grouped([Layer(width) for _ in range(depth)], sizes)
    return Workload(model, {"x": torch.randn(rows, width)}, _square, _sgd(model, 0.0), name="layers")


def blocks(depth: int, sizes: Sequence[int], *, batch_size: int, length: int, width: int) -> Workload:
    """A chain of `depth` equal Transformer blocks, SGD; `sizes` as in `grouped`."""
    model = grouped([Block(width) for _ in range(depth)], sizes)
    return Workload(model, {"x": torch.randn(batch_size, length, width)}, _square, _sgd(model, 0.0), name="blocks")


def _square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = (model(batch["x"]) ** 2).mean()
    return loss


def grouped(modules: Iterable[nn.Module], sizes: Sequence[int]) -> nn.Sequential:
    """Return a chain as groups of groups, so that any of them can be checkpointed: it computes the same.

    Args:
        modules: The chain's members.
        sizes: How many members the groups of each level hold, the smallest first, each a divisor of the next.
    """
    level, members = list(modules), 1
    for size in sizes:
        count = size // members
        level, members = [nn.Sequential(*level[i : i + count]) for i in range(0, len(level), count)], size
    return nn.Sequential(*level)


def groups_of(model: nn.Module, size: int) -> list[str]:
    """Return the names of a chain's groups that hold `size` members; of its members themselves for 1."""
    counts = {
        name: sum(isinstance(inner, Layer | Block) for inner in module.modules())
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Sequential | Layer | Block)
    }
    return [name for name, count in counts.items() if count == size]


class Recomputed(nn.Module):
    """A group of a chain that is computed again in the backward pass; its own groups are so once more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def nested(made: Workload, sizes: Sequence[int]) -> Workload:
    """Return a chain in groups of these sizes, the smallest first, of which each is checkpointed, one in the other."""
    level, members = list(made.model.children()), 1
    for size in sizes:
        count = size // members
        groups = [level[i : i + count] for i in range(0, len(level), count)]
        level, members = [Recomputed(group[0] if count == 1 else nn.Sequential(*group)) for group in groups], size
    model = nn.Sequential(*level)
    return Workload(model, made.batch, made.loss_fn, _sgd(model, 0.0), name=made.name)


class StraightThrough(torch.autograd.Function):
    """A sign whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


UNDIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "`argmax`, as an index": lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1]),
    "`topk`, as a router": lambda x: x * (x >= x.topk(4, dim=-1).values[..., -1:]),
    "`round`, straight through": lambda x: x + (x.round() - x).detach(),
    "`sign`, an autograd function of one's own": lambda x: StraightThrough.apply(x),  # type: ignore[no-untyped-call]
    "`bucketize`": lambda x: x + torch.bucketize(x, torch.linspace(-2, 2, 9)),
    "`multinomial`, drawn": lambda x: x * F.one_hot(torch.multinomial(x.softmax(-1), 1)[:, 0], x.shape[-1]),
    "`sort` and `cumsum`": lambda x: x.sort(-1).values.cumsum(-1),
    "`int` and back": lambda x: x + x.int(),
}
"""Functions on the way of a forward pass that have no gradient, or one of the user's own."""


class Stepped(nn.Module):
    """Linear layers with such a function between them."""

    def __init__(self, kind: str, width: int = 64) -> None:
        super().__init__()
        self.kind = kind
        self.before, self.after = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(UNDIFFERENTIABLE[self.kind](F.gelu(self.before(x))))
        return x + y


def undifferentiable(kind: str) -> Workload:
    """Four members with a function that has no gradient, SGD."""
    model = nn.Sequential(*(Stepped(kind) for _ in range(4)))
    return Workload(model, {"x": torch.randn(256, 64)}, _square, _sgd(model, 0.0), name="stepped")


def outermost(model: nn.Module, kinds: Sequence[str]) -> list[str]:
    """Return the names of a model's modules of some classes, by name, that lie in no other of them."""
    found: list[str] = []
    for name, module in model.named_modules():
        if type(module).__name__ in kinds and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def unet(shape: tuple[int, int, int], channels: Sequence[int], norm: str = "instance") -> Workload:
    """MONAI's 3-D residual UNet, whose first level is at half resolution; 1 channel in, 4 classes out, AdamW."""
    from monai.networks import nets

    model = nets.UNet(3, 1, 4, channels, strides=(2,) * (len(channels) - 1), num_res_units=2, norm=norm)
    return _segmentation(model.train(), shape, "unet")


def full_unet(shape: tuple[int, int, int], base: int) -> Workload:
    """MONAI's DynUNet as nnU-Net uses it: five levels, the first at full resolution with `base` channels; AdamW."""
    from monai.networks import nets

    strides = [1, 2, 2, 2, 2]
    filters = [min(320, base * 2**i) for i in range(len(strides))]
    model = nets.DynUNet(3, 1, 4, [3] * len(strides), strides, strides[1:], filters=filters)
    return _segmentation(model.train(), shape, "dynunet")


def _segmentation(model: nn.Module, shape: tuple[int, int, int], name: str) -> Workload:
    batch = {"x": torch.randn(1, 1, *shape), "y": torch.randint(4, (1, *shape))}
    return Workload(model, batch, _segment, torch.optim.AdamW(model.parameters()), name=name)


def _segment(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)

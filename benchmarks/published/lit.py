"""LitGPT's LoRA script of October 2023: its model, its adapters on queries and values, its chunked head and loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.building import dtype, trained
from memfit import Loop, Workload

CHUNK, RANK, SCALE, DROPOUT = 128, 8, 2.0, 0.05


@dataclass(frozen=True)
class Config:
    """The sizes of a model, as LitGPT's `config.py` has them."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    inner: int
    rotary: float
    llama: bool = False
    shared_norm: bool = False
    head_bias: bool = False
    tanh: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads


CONFIGS = {
    "phi-1.5": Config(24, 32, 2048, 51200, 8192, 0.5, shared_norm=True, head_bias=True, tanh=True),
    "stablelm-3b": Config(16, 32, 4096, 50688, 16384, 0.25),
    "llama-2-7b": Config(32, 32, 4096, 32000, 11008, 1.0, llama=True),
}


class RMSNorm(nn.Module):
    """LitGPT's norm for Llama, in float32 as of commit 6178c7cc."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + 1e-5)
        return (self.weight * x_normed).to(dtype=given)


class LoRAQKV(nn.Module):
    """The projection to queries, keys and values, with adapters for queries and values that are padded with zeros."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.linear = nn.Linear(width, 3 * width, bias=not config.llama)
        self.dropout = nn.Dropout(DROPOUT)
        self.lora_a = nn.Parameter(torch.empty(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.empty(2 * width, RANK))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_a = F.linear(self.dropout(x), self.lora_a)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        lora = self._padded(after_b) * SCALE
        found: Tensor = pretrained + lora
        return found

    def _padded(self, x: Tensor) -> Tensor:
        outputs = self.linear.out_features
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], outputs)).view(-1, outputs)
        index = torch.empty(2 * outputs // 3, dtype=torch.long, device=x.device)
        result = result.index_copy(1, index, x.reshape(-1, 2 * outputs // 3))
        return result.view((*x.shape[:-1], outputs)).transpose(0, 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys rotated by position; float16 tables make it float32 in between."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).type_as(x)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.attn = LoRAQKV(config)
        self.proj = nn.Linear(config.width, config.width, bias=not config.llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        heads, head = self.config.heads, self.config.head
        qkv = self.attn(x).view(batch, tokens, heads, 3, head).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        k = k.expand(batch, heads, 1, tokens, head)
        v = v.expand(batch, heads, 1, tokens, head)
        q, k, v = (part.reshape(batch, -1, tokens, head) for part in (q, k, v))
        turned = int(self.config.rotary * head)
        q_roped, k_roped = apply_rope(q[..., :turned], cos, sin), apply_rope(k[..., :turned], cos, sin)
        q = torch.cat((q_roped, q[..., turned:]), dim=-1)
        k = torch.cat((k_roped, k[..., turned:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        found: Tensor = self.proj(y.reshape(batch, tokens, width))
        return found


class MLP(nn.Module):
    """GPT-NeoX's MLP or Llama's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        bias = not config.llama
        self.tanh = "tanh" if config.tanh else "none"
        self.fc = nn.Linear(config.width, config.inner, bias=bias)
        self.gate = nn.Linear(config.width, config.inner, bias=bias) if config.llama else None
        self.proj = nn.Linear(config.inner, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            first, second = self.fc(x), self.gate(x)
            x = F.silu(first) * second
        else:
            x = self.fc(x)
            x = F.gelu(x, approximate=self.tanh)
        found: Tensor = self.proj(x)
        return found


class Block(nn.Module):
    """A block, with its parts in parallel but for Llama."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        norm = RMSNorm if config.llama else nn.LayerNorm
        self.parallel = not config.llama
        self.norm_1, self.attn = norm(config.width), Attention(config)
        self.norm_2 = None if config.shared_norm else norm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            x = x + h + self.mlp(n_2)
        else:
            x = x + h
            x = x + self.mlp(self.norm_2(x))  # type: ignore[misc]
        return x


class GPT(nn.Module):
    """The model, whose head works on chunks of 128 tokens and whose logits Fabric turns to float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=config.head_bias)
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = RMSNorm(config.width) if config.llama else nn.LayerNorm(config.width)
        table = torch.float16 if torch.get_default_dtype() == torch.bfloat16 else torch.float32
        turned = int(config.rotary * config.head)
        self.register_buffer("cos", torch.empty(length, turned, dtype=table))
        self.register_buffer("sin", torch.empty(length, turned, dtype=table))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        chunks = [self.lm_head(part) for part in x.split(CHUNK, dim=1)]
        return [chunk.float() for chunk in chunks]


def lora(name: str, batch: int, length: int, half: bool = True) -> Workload:
    """The step on the longest sample, in bfloat16 or in mixed precision."""
    with dtype(torch.bfloat16 if half else torch.float32):
        model = GPT(CONFIGS[name], length)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name)
    tokens = {key: torch.empty(batch, length, dtype=torch.long) for key in ("x", "y")}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        logits[-1] = logits[-1][..., :-1, :]
        targets = batch["y"][..., 1:].split(logits[0].size(1), dim=1)
        losses = [
            F.cross_entropy(part.reshape(-1, part.size(-1)), target.reshape(-1), ignore_index=-1, reduction="none")
            for part, target in zip(logits, targets, strict=True)
        ]
        return torch.cat(losses).mean()

    optimizer = torch.optim.AdamW(trained(model), lr=3e-4, weight_decay=0.01)
    return Workload(model, tokens, loss, optimizer, loop=Loop(holds_outputs="step", zero_grad="after-step"))

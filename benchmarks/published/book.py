"""The GPT of *Build a Large Language Model (From Scratch)*, in the states that its speed-up list goes through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.building import dtype
from memfit import Loop, Workload

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY, DROPOUT = 768, 12, 12, 1024, 50257, 0.1


class WrittenAttention(nn.Module):
    """Attention written out, with a mask of floats that each layer has, or one made in each call."""

    mask: Tensor

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out_proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        if buffer:
            self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys = keys.view(batch, tokens, HEADS, -1).transpose(1, 2)
        values = values.view(batch, tokens, HEADS, -1).transpose(1, 2)
        queries = queries.view(batch, tokens, HEADS, -1).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if hasattr(self, "mask"):
            mask = self.mask.bool()[:tokens, :tokens]
        else:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ values).transpose(1, 2).reshape(batch, tokens, width)
        found: Tensor = self.out_proj(mixed)
        return found


class FusedAttention(nn.Module):
    """One projection, and scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=DROPOUT, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, tokens, width)
        found: Tensor = self.proj(mixed)
        return found


class WrittenNorm(nn.Module):
    """A layer norm of elementwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        norm_x = (x - mean) / torch.sqrt(var + 1e-5)
        return self.scale * norm_x + self.shift


class WrittenGELU(nn.Module):
    """GELU by tanh of elementwise operators."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """A block whose norms and activation are written out or PyTorch's."""

    def __init__(self, attention: str, written: bool) -> None:
        super().__init__()
        self.att = FusedAttention() if attention == "fused" else WrittenAttention(attention == "buffer")
        activation = WrittenGELU() if written else nn.GELU(approximate="tanh")
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))
        self.norm1, self.norm2 = (WrittenNorm() if written else nn.LayerNorm(WIDTH) for _ in range(2))
        self.drop_shortcut = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = self.drop_shortcut(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = self.drop_shortcut(x)
        return x + shortcut


class GPT(nn.Module):
    """The model, with a head of its own weights."""

    def __init__(self, attention: str, written: bool) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop_emb = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(attention, written) for _ in range(LAYERS)))
        self.final_norm = WrittenNorm() if written else nn.LayerNorm(WIDTH)
        self.out_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.blocks(self.drop_emb(x))
        found: Tensor = self.out_head(self.final_norm(x))
        return found


def gpt(attention: str = "made", written: bool = True, fused: bool = False, half: bool = False) -> Workload:
    """The training step of batch 8 x 1024.

    Args:
        attention: "buffer" or "made" for a mask that is kept or made, "fused" for one kernel.
        written: Whether norms and GELU are written out.
        fused: Whether AdamW is fused.
        half: Whether the model is in bfloat16.
    """
    with dtype(torch.bfloat16 if half else torch.float32):
        model = GPT(attention, written)
    batch = {name: torch.empty(8, CONTEXT, dtype=torch.long) for name in ("x", "y")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused or None)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    return Workload(model, batch, loss, optimizer, loop=Loop())

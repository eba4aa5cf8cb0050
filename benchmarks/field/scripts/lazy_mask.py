"""Masks and tables are made when they are first needed, and kept: by `lru_cache`, in a dict, and on a class."""

import functools

import torch
from networks import Block, save
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
TABLES = {}


@functools.lru_cache
def mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def angles(length, width):
    if (length, width) not in TABLES:
        rates = 1 / 10_000 ** (torch.arange(0, width, 2) / width)
        TABLES[length, width] = torch.outer(torch.arange(length), rates).repeat(1, 2)
    return TABLES[length, width]


class Layer(nn.Module):
    window = None

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.qkv, self.mlp = heads, nn.Linear(width, 3 * width), Block(width)

    def forward(self, x):
        if Layer.window is None:
            Layer.window = torch.hann_window(x.shape[-1])
        q, k, v = self.qkv(x * Layer.window).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        table = angles(x.shape[1], q.shape[-1])
        q, k = (t * table.cos() + t.roll(t.shape[-1] // 2, -1) * table.sin() for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(x.shape[1]))
        return self.mlp(x + y.transpose(1, 2).reshape(x.shape))


model = nn.Sequential(nn.Embedding(256, 64), *(Layer(64) for _ in range(4)), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    tokens = torch.randint(0, 256, (8, 128))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
save(model=model)

"""Small networks, and how the scripts beside this file end."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block of a multi-layer perceptron, as transformers have it."""

    def __init__(self, width, inner=4, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, inner * width),
            nn.Linear(inner * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def perceptron(depth=6, width=64, out=10, dropout=0.0):
    """Residual blocks and a head: rows of `width` numbers in, rows of `out` numbers out."""
    return nn.Sequential(*(Block(width, dropout=dropout) for _ in range(depth)), nn.Linear(width, out))


class ConvNet(nn.Module):
    """A convolutional network for images of any size."""

    def __init__(self, width=24, depth=5, classes=10, channels=3):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    @staticmethod
    def _block(width):
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def features(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width, heads), Block(width)

    def forward(self, x):
        return self.mlp(x + self.attention(self.norm(x)))


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, width=96, depth=4, heads=4, context=512, vocabulary=256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def samples(rows=1024, width=64, classes=10):
    return torch.randn(rows, width), torch.randint(0, classes, (rows,))


def images(count=16, size=32, classes=10):
    return torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))


def save(**modules):
    torch.save({name: module.state_dict() for name, module in modules.items()}, "last.pt")

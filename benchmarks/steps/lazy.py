"""Steps whose tables are made when they are first needed, and kept: by a cache, in a dict, on a class or a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import VOCABULARY, class_loss, images, seed_all, tokens
from memfit import Workload

ANGLES: dict[tuple[int, int], Tensor] = {}


@functools.lru_cache
def causal_mask(length: int) -> Tensor:
    """Return which places a token sees."""
    return torch.ones(length, length).tril().log()


@functools.cache
def near_mask(length: int, reach: int = 32) -> Tensor:
    """Return which places are near each other, as no mask of PyTorch's own has it."""
    at = torch.arange(length)
    return (at[:, None] - at).abs() < reach


def rotated(x: Tensor) -> Tensor:
    """Return heads turned by their places (Su et al. 2021, RoPE), by angles that the module keeps."""
    length, width = x.shape[-2:]
    if (length, width) not in ANGLES:
        rates = 10_000 ** (-torch.arange(0, width, 2) / width)
        ANGLES[length, width] = torch.outer(torch.arange(length), rates).repeat(1, 2)
    angles = ANGLES[length, width]
    return x * angles.cos() + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * angles.sin()


def decayed(x: Tensor, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    """Return places weighed by their distance to the last one, from a table that a default argument keeps."""
    length = x.shape[1]
    if length not in known:
        known[length] = torch.linspace(0, 1, length).exp()[None, :, None]
    return x * known[length]


class Attending(nn.Module):
    """A layer of self-attention and a perceptron, given what is done with its heads and its mask."""

    def __init__(
        self, width: int, turn: Callable[[Tensor], Tensor] | None, mask: Callable[[int], Tensor] | None
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.turn, self.mask = nn.Linear(width, 3 * width), nn.Linear(width, width), turn, mask
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        mask = None if self.mask is None else self.mask(x.shape[1])
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(x)
        return out


def _reader(
    name: str,
    seed: int,
    turn: Callable[[Tensor], Tensor] | None = None,
    mask: Callable[[int], Tensor] | None = None,
    after: nn.Module | None = None,
) -> Workload:
    seed_all(seed)
    layers = [Attending(128, turn, mask) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 128), *layers, after or nn.Identity(), nn.Linear(128, 512))
    batch = {"x": tokens(8, 128), "y": torch.randint(0, 512, (8, 128))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, batch, _token_loss, optimizer, name=name, max_grad_norm=1.0)


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def cached_mask() -> Workload:
    """A causal mask from `lru_cache`."""
    return _reader("cached_mask", 300, mask=causal_mask)


def cached_reach() -> Workload:
    """A boolean mask of near places from `functools.cache`, and heads turned by angles from a dict of the module."""
    return _reader("cached_reach", 301, turn=rotated, mask=near_mask)


def rotary_table() -> Workload:
    """Heads turned by angles that a dict of the module keeps."""
    return _reader("rotary_table", 302, turn=rotated)


class Decay(nn.Module):
    """Weighs places by a table in a default argument."""

    def forward(self, x: Tensor) -> Tensor:
        return decayed(x)


def table_in_a_default() -> Workload:
    """A table that a default argument keeps."""
    return _reader("table_in_a_default", 303, after=Decay())


class Spectrum(nn.Module):
    """Power spectra; the window is made at the first call and kept on the class."""

    window: ClassVar[Tensor | None] = None

    def forward(self, wave: Tensor) -> Tensor:
        if Spectrum.window is None:
            Spectrum.window = torch.hann_window(256)
        return torch.stft(wave, 256, 64, window=Spectrum.window, return_complex=True).abs().log1p()


def window_on_a_class() -> Workload:
    """A classifier of waves, by spectra whose window a class keeps."""
    seed_all(304)
    body = nn.Sequential(nn.Conv1d(129, 256, 5, padding=2), nn.GELU(), nn.Conv1d(256, 256, 5, padding=2), nn.GELU())
    model = nn.Sequential(Spectrum(), body, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 10))
    batch = {"x": torch.randn(16, 16_000), "y": torch.randint(0, 10, (16,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, batch, class_loss, optimizer, name="window_on_a_class")


class Filters(nn.Module):
    """Fixed filters in front of convolutions that train; they become a buffer at the first call."""

    bank: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", None, persistent=False)
        self.body = nn.Sequential(nn.Conv2d(24, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.bank is None:
            at = torch.linspace(-1, 1, 7)
            waves = torch.cos(torch.arange(1, 25)[:, None, None] * (at[:, None] + at[None, :]))
            self.bank = waves[:, None].expand(-1, 3, -1, -1).contiguous()
        return self.head(self.body(F.conv2d(x, self.bank, padding=3)).mean((2, 3)))  # type: ignore[no-any-return]


def late_buffer() -> Workload:
    """A buffer that the first call fills."""
    seed_all(305)
    model = Filters()
    return Workload(model, images(12, 48), class_loss, torch.optim.Adam(model.parameters()), name="late_buffer")

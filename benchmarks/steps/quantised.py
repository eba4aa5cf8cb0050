"""Steps whose frozen weights are wrapper subclasses: what quantisation libraries make of them, written here anew."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.steps.data import class_loss, seed_all
from memfit import Workload


class Scaled(Tensor):
    """A matrix of small integers and a scale for each row, which looks like one of floats.

    Args:
        codes: Of int8.
        scale: A number for each row.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        """Return a matrix in 8 bits."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantised(self) -> Tensor:
        """Return the floats."""
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            self = args[0]
            return type(self)(func(self.codes), func(self.scale))
        plain = [a.dequantised() if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Packed(Scaled):
    """Two numbers of 4 bits in each byte of the codes."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        shape = (codes.shape[0], 2 * codes.shape[1])
        made: Packed = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        """Return a matrix in 4 bits."""
        scale = weight.abs().amax(1, keepdim=True) / 7
        whole = (weight / scale).round().to(torch.int8) + 8
        return cls((whole[:, ::2] * 16 + whole[:, 1::2]).to(torch.uint8), scale)

    def dequantised(self) -> Tensor:
        """Return the floats."""
        both = torch.stack([self.codes // 16, self.codes % 16], -1).flatten(1)
        return (both.to(self.scale.dtype) - 8) * self.scale


class Adapted(nn.Module):
    """A frozen quantised matrix, and two small ones beside it that train (Dettmers et al. 2023, QLoRA)."""

    def __init__(self, kind: type[Scaled], width: int, rank: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind.of(torch.randn(width, width) / width**0.5), requires_grad=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight) + self.up(self.down(x)))


def _adapted(name: str, kind: type[Scaled], seed: int, depth: int = 6, width: int = 768) -> Workload:
    seed_all(seed)
    model = nn.Sequential(*(Adapted(kind, width) for _ in range(depth)), nn.Linear(width, 10))
    batch = {"x": torch.randn(256, width), "y": torch.randint(0, 10, (256,))}
    trained = [p for p in model.parameters() if p.requires_grad]
    return Workload(model, batch, class_loss, torch.optim.AdamW(trained, lr=1e-3), name=name)


def int8_adapters() -> Workload:
    """Adapters beside weights of 8 bits."""
    return _adapted("int8_adapters", Scaled, 350)


def int4_adapters() -> Workload:
    """Adapters beside weights of 4 bits, two in a byte."""
    return _adapted("int4_adapters", Packed, 351)


def quantised_tower() -> Workload:
    """A frozen tower of quantised matrices under `no_grad`, and a head that trains on its features."""
    seed_all(352)
    tower = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))).requires_grad_(False)
    for layer in tower:
        layer.weight = nn.Parameter(Scaled.of(layer.weight.detach()), requires_grad=False)  # type: ignore[operator]
    head = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = tower, head

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in self.tower:
                    x = torch.relu(layer(x))
            out: Tensor = self.head(x)
            return out

    model = Frozen()
    batch = {"x": torch.randn(512, 512), "y": torch.randint(0, 10, (512,))}
    return Workload(model, batch, class_loss, torch.optim.AdamW(head.parameters()), name="quantised_tower")

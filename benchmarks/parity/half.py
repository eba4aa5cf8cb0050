"""fp16 on a processor without it: products of fp16 numbers in fp32, rounded to fp16, as tensor cores do; and a log."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_aten = torch.ops.aten
PRODUCTS = {
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.addmm.default,
    _aten.mm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""What a CPU without fp16 units takes many times as long for as in fp32 (`slowdowns`)."""


class HalfProducts(TorchDispatchMode):
    """Runs a step's `PRODUCTS` of fp16 numbers in fp32, rounds the results, and writes down what ran in which dtype.

    Attributes:
        seen: For each operator that computes, the dtypes of its first floating-point input.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = next((a.dtype for a in tree_iter(args) if isinstance(a, torch.Tensor) and a.is_floating_point()), None)
        if dtype is torch.float16 and func in PRODUCTS:
            self.seen[func.overloadpacket.__name__].add("fp16 in, fp32 inside")
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
            return tree_map_only(torch.Tensor, _narrowed, func(*args, **kwargs))
        if dtype is not None and torch.Tag.pointwise not in func.tags and not func.is_view:
            self.seen[func.overloadpacket.__name__].add(str(dtype).removeprefix("torch."))
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.float16 else tensor


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.dtype is torch.float32 else tensor


def slowdowns(rounds: int = 5) -> dict[str, float]:
    """Return how many times as long as in fp32 a layer's forward and backward pass take in fp16's own kernels."""
    layers: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {
        "linear": (torch.nn.Linear(64, 256), torch.randn(1024, 64)),
        "2-D convolution": (torch.nn.Conv2d(32, 32, 3, padding=1), torch.randn(64, 32, 8, 8)),
        "3-D convolution": (torch.nn.Conv3d(8, 16, 3, padding=1), torch.randn(2, 8, 16, 16, 16)),
    }
    return {
        name: _seconds(layer.half(), x.half(), rounds) / seconds
        for name, (layer, x) in layers.items()
        for seconds in [_seconds(layer, x, rounds)]
    }


def _seconds(layer: torch.nn.Module, x: torch.Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        started = time.process_time()
        layer(x.requires_grad_()).sum().backward()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])

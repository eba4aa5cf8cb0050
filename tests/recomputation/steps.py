"""Steps of small models with regions, and what they leave: shared by the tests of checkpointing."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.ir import Region
from memfit.recomputation import checkpointed, lean


class Executed(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dim: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x)


class Chain(nn.Module):
    """Residual blocks that the forward pass calls one after the other, and a head."""

    def __init__(self, dim: int = 16, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(dim) for _ in range(blocks)])
        self.head = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(*indices: int, keep: tuple[str, ...] = ()) -> Region:
    """Return a run of a chain's blocks."""
    return Region(tuple(f"blocks.{i}" for i in indices), keep)


def chain(blocks: int = 5, dim: int = 16) -> Chain:
    torch.manual_seed(0)
    return Chain(dim, blocks)


def loss(model: nn.Module, samples: int = 8, dim: int = 16) -> torch.Tensor:
    x = torch.linspace(-1, 1, samples * dim).view(samples, dim)
    return model(x).square().mean()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Collect no cycles, which would hold memory that autograd lets go of, until the context is left."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Forward = Callable[[nn.Module], torch.Tensor]


def results(
    model: nn.Module, forward: Forward, regions: Sequence[Region] = (), patterns: Sequence[str] = (), *, steps: int = 3
) -> dict[str, Any]:
    """Return losses, gradients, buffers and the generator's state after some steps of gradient descent, undone after.

    Args:
        model: In training mode.
        forward: Returns the loss.
        regions: To checkpoint.
        patterns: Of modules to make lean.
        steps: How many.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, Any] = {}
    torch.manual_seed(1)
    with lean(model, patterns), checkpointed(model, regions):
        for step in range(steps):
            model.zero_grad()
            loss = forward(model)
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            found |= {
                f"gradient {step} of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
    found |= {f"{name} after": value.clone() for name, value in model.state_dict().items()}
    found["random state"] = torch.get_rng_state()
    model.load_state_dict(before)
    model.zero_grad()
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def executed(
    model: nn.Module, forward: Forward, regions: Sequence[Region] = (), patterns: Sequence[str] = ()
) -> Counter[str]:
    """Return how often each operator runs in a forward and backward pass."""
    with lean(model, patterns), checkpointed(model, regions), Executed() as mode:
        forward(model).backward()
    model.zero_grad()
    return mode.counts

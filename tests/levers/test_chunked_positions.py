"""Losses of pixels, frames and samples in chunks: segmentation, CTC and transducers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.ir import ChunkedLoss, Levers
from memfit.levers import switched

CLASSES, FEATURES = 13, 5
Loss = Callable[[Any, Tensor], Tensor]


@contextmanager
def largest() -> Iterator[list[int]]:
    """Record how many rows of classes the tensors have that are made."""
    found = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in [] if func.is_view else tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and CLASSES in t.shape and FEATURES not in t.shape:
                    found.append(t.numel() // CLASSES)
            return out

    with Sizes():  # type: ignore[no-untyped-call]
        yield found


def outcome(model: nn.Module, loss: Callable[[], Tensor], rows: int | None) -> tuple[Tensor, Tensor, int]:
    """Return a loss, its gradients and the most rows of logits that there were."""
    model.zero_grad()
    lever = None if rows is None else ChunkedLoss(head="head", rows=rows)
    with switched(model, Levers(microbatch_size=1, chunked_loss=lever)), largest() as sizes:
        found = loss()
        found.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.detach() + 0, torch.cat(gradients), max(sizes)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class Segmenter(nn.Module):
    def __init__(self, dims: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.body = convolution(3, FEATURES, 3, padding=1)
        self.head = convolution(FEATURES, CLASSES, 1, bias=bias)

    def forward(self, images: Tensor) -> Any:
        return self.head(torch.tanh(self.body(images)))


WEIGHT = torch.linspace(0.5, 2, CLASSES)


def focal(x: Any, y: Tensor) -> Tensor:
    losses = F.cross_entropy(x, y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def classes_last(x: Any) -> Any:
    return x.permute(0, *range(2, x.dim()), 1).reshape(-1, x.size(1))


SEGMENTATION: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum, some ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=3, reduction="sum"),
    "smoothed": lambda x, y: F.cross_entropy(x.float(), y, label_smoothing=0.1),
    "weighted classes": lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, ignore_index=3, label_smoothing=0.1),
    "a module": lambda x, y: nn.CrossEntropyLoss(ignore_index=3)(x.contiguous(), y),
    "classes last": lambda x, y: F.cross_entropy(classes_last(x), y.reshape(-1)),
    "flat": lambda x, y: F.cross_entropy(x.flatten(2), y.flatten(1)),
    "in another shape": lambda x, y: F.cross_entropy(x.view(x.size(0), CLASSES, -1), y.view(y.size(0), -1)),
    "flat, transposed": lambda x, y: F.cross_entropy(x.flatten(2).transpose(1, 2).flatten(0, 1), y.flatten()),
    "pixels first": lambda x, y: F.cross_entropy(
        x.flatten(2).permute(2, 0, 1).reshape(-1, CLASSES), y.flatten(1).t().flatten()
    ),
    "a part": lambda x, y: F.cross_entropy(x[1:, :, 2:-1], y[1:, 2:-1]),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, dim=1), y, ignore_index=3),
    "focal": focal,
    "a mask": lambda x, y: (F.cross_entropy(x, y, reduction="none") * (y > 4)).sum() / (y > 4).sum(),
    "each class by itself": lambda x, y: F.binary_cross_entropy_with_logits(
        x, F.one_hot(y, CLASSES).movedim(-1, 1).float()
    ),
    "distilled": lambda x, y: F.kl_div(
        x.log_softmax(1), F.one_hot(y, CLASSES).movedim(-1, 1).float().softmax(1), reduction="sum"
    ),
    "entropy": lambda x, y: (x.logsumexp(1) - (x.softmax(1) * x).sum(1)).mean(),
    "beside a metric": lambda x, y: F.cross_entropy(x, y) * (x.argmax(1) == y).float().mean(),
}
SHAPES = [(3, 7, 9), (2, 16, 12), (1, 6, 11), (3, 200), (2, 4, 5, 3), (2, 5, 6, 7)]
NUMBERS: dict[str, Loss] = {
    "interpolated": lambda x, y: F.interpolate(x, scale_factor=2).square().mean(),
    "mixed shapes": lambda x, y: x.contiguous().view(x.size(0), -1)[:, 3:].logsumexp(1).sum(),
    "over pixels": lambda x, y: x.flatten(2).softmax(2).square().sum(),
    "dice": lambda x, y: (x.softmax(1).flatten(2) * F.one_hot(y.flatten(1), CLASSES).mT).sum((0, 2)).log().sum(),
}


@pytest.mark.parametrize("name", [*SEGMENTATION, *NUMBERS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_pixels_are_computed_in_chunks(name: str, shape: tuple[int, ...], layout: str) -> None:
    if name == "a part" and shape[0] == 1:
        pytest.skip("one image")
    model = Segmenter(len(shape) - 1, bias=layout == "channels first")
    images = torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(1))
    if layout == "channels last" and len(shape) > 2:
        form: Any = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        model, images = model.to(memory_format=form), images.to(memory_format=form)  # type: ignore[call-overload]
    targets = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))

    def loss() -> Tensor:
        return (SEGMENTATION | NUMBERS)[name](model(images), targets)

    expected, gradients, _ = outcome(model, loss, None)
    for rows in (20, 1000):
        found, chunked, most = outcome(model, loss, rows)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
        assert name in NUMBERS or name in ("each class by itself", "distilled") or most <= rows
    assert relative(gradients + 1e-4 * gradients.norm(), gradients) > 1e-5

"""What is done with each row of logits is done a few rows at a time, and gives what it gives with all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.ir import ChunkedLoss, Levers
from memfit.levers import switched

CLASSES, ROWS = 37, 4


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=bias)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.offsets = nn.Parameter(torch.linspace(-1, 1, CLASSES))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


SOFT = torch.linspace(0, 1, 3 * 7 * CLASSES).sin().view(3, 7, CLASSES).softmax(-1)
Loss = Callable[[Model, Any, Tensor], Tensor]


def chosen(x: Any, y: Tensor) -> Any:
    return x.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)


def entropy(x: Any) -> Any:
    p = F.softmax(x, dim=-1)
    return torch.logsumexp(x, dim=-1) - torch.sum(p * x, dim=-1)


def jensen_shannon(x: Any, z: Any) -> Any:
    p, q = x.log_softmax(-1), z.log_softmax(-1)
    m = torch.logaddexp(p, q) - 0.6931471805599453
    return 0.5 * (F.kl_div(m, p, reduction="none", log_target=True) + F.kl_div(m, q, reduction="none", log_target=True))


def weights_of(y: Tensor) -> Tensor:
    return (y.float() + 1).requires_grad_()


def by_trl(name: str, *args: Any, **kwargs: Any) -> Any:
    utils = pytest.importorskip("trl.trainer.utils")
    return getattr(utils, name)(*args, **kwargs)


def grpo(model: Model, x: Any, y: Tensor) -> Tensor:
    x = x[:, :-1, :] / 0.9
    logs, y = by_trl("selective_log_softmax", x, y[:, 1:]), y[:, 1:]
    with torch.no_grad():
        old = by_trl("selective_log_softmax", x, y) - 0.1
        certain = by_trl("entropy_from_logits", x, chunk_size=5).lt(3.5)
    ratio = torch.exp(logs - old)
    gain = torch.min(ratio, torch.clamp(ratio, 0.8, 1.2))
    return (gain * certain).sum() / certain.sum()


def categorical(model: Model, x: Any, y: Tensor) -> Tensor:
    found = torch.distributions.Categorical(logits=x, validate_args=False)
    return (found.log_prob(y) + 0.1 * found.entropy()).mean()


DEFERRED: dict[str, Loss] = {
    "gather": lambda m, x, y: -chosen(x, y).mean(),
    "shifted gather": lambda m, x, y: -(chosen(x[:, :-1], y[:, 1:]) * (y[:, 1:] > 9)).sum() / (y[:, 1:] > 9).sum(),
    "flat gather": lambda m, x, y: -torch.gather(x.view(-1, CLASSES).log_softmax(1), 1, y.view(-1, 1)).view(-1).mean(),
    "logsumexp": lambda m, x, y: torch.logsumexp(x.float(), -1).square().mean(),
    "keepdim": lambda m, x, y: ((x - torch.logsumexp(x, -1, keepdim=True)).exp() * x).sum(-1).pow(2).mean(),
    "z-loss": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) + 1e-2 * (x.logsumexp(-1) ** 2).mean(),
    "entropy": lambda m, x, y: entropy(x).mean(),
    "entropy beside": lambda m, x, y: (chosen(x, y) * entropy(x).detach()).sum() - 0.1 * entropy(x).sum(),
    "nll_loss": lambda m, x, y: F.nll_loss(torch.log_softmax(x.flatten(0, 1), -1), y.flatten(), ignore_index=3),
    "nll_loss, classes second": lambda m, x, y: F.nll_loss(x.transpose(1, 2).log_softmax(1), y, reduction="sum"),
    "weighted classes": lambda m, x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, 1 + CLASSES), label_smoothing=0.1, ignore_index=5
    ),
    "rows apart": lambda m, x, y: (
        F.cross_entropy(x.permute(0, 2, 1), y, reduction="none") * y.sigmoid().softmax(-1)
    ).sum(),
    "soft targets": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), SOFT.flatten(0, 1)),
    "soft-capped": lambda m, x, y: -chosen(2 * torch.tanh(x / 2), y).mean(),
    "capped cross entropy": lambda m, x, y: F.cross_entropy((2 * torch.tanh(x / 2)).flatten(0, 1), y.flatten()),
    "a learnt temperature": lambda m, x, y: -chosen(x / m.temperature + m.offsets, y).mean(),
    "learnt weights of rows": lambda m, x, y: -(chosen(x * weights_of(y)[..., None], y)).mean(),
    "a mask of classes": lambda m, x, y: (
        -chosen(x.masked_fill(torch.arange(CLASSES) > 35, -1e4), y.clamp(max=35)).sum()
    ),
    "some classes": lambda m, x, y: (
        -chosen(x[..., :30], y.clamp(max=29)).mean() + x[:, -1, [3, 5]].softmax(-1)[:, 0].sum()
    ),
    "one row after the other": lambda m, x, y: -torch.stack([chosen(a, b) for a, b in zip(x, y, strict=True)]).mean(),
    "parts of rows": lambda m, x, y: torch.cat(
        [e for part in x.flatten(0, 1).split(5) for e in [entropy(part)]]
    ).mean(),
    "tokens first": lambda m, x, y: -chosen(x.transpose(0, 1), y.t()).square().mean(),
    "trl": lambda m, x, y: -by_trl("selective_log_softmax", x, y, temperature=0.7).mean(),
    "trl, several": lambda m, x, y: by_trl("selective_log_softmax", x, torch.stack([y, y.flip(0)], -1)).square().sum(),
    "trl, entropy": lambda m, x, y: by_trl("entropy_from_logits", x, chunk_size=6).mean(),
    "grpo": grpo,
    "a policy": categorical,
    "squares": lambda m, x, y: F.mse_loss(x, SOFT) + x.square().mean() + x.abs().sum((-1, -2)).max(),
    "greatest": lambda m, x, y: (
        x.max(-1).values.sum() + x.topk(3).values.sum(-1).square().mean() + torch.amin(x, -1).sum()
    ),
    "detached": lambda m, x, y: (x.softmax(-1).detach() * x.square()).sum(-1).mean(),
    "accuracy beside": lambda m, x, y: -chosen(x, y).sum() * (x.argmax(-1) == y).float().mean(),
}
TWO: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "kl": lambda x, z, y: F.kl_div(x.log_softmax(-1), z.softmax(-1), reduction="batchmean"),
    "kl, summed by row": lambda x, z, y: (
        (z.softmax(-1) * (z.log_softmax(-1) - x.log_softmax(-1))).sum(-1) * (y > 4)
    ).sum(),
    "jensen-shannon": lambda x, z, y: jensen_shannon(x / 0.8, z).sum(-1).mean(),
    "jensen-shannon, all": lambda x, z, y: jensen_shannon(x[:, 1:], z[:, 1:]).sum(),
    "dpo": lambda x, z, y: -F.logsigmoid(0.1 * (chosen(x, y) - chosen(z, y)).sum(-1)).mean(),
    "the best of a teacher": lambda x, z, y: (
        -(z.topk(3, -1).values.softmax(-1) * x.log_softmax(-1).gather(-1, z.topk(3, -1).indices)).sum(-1).mean()
    ),
    "squares": lambda x, z, y: F.mse_loss(x, z) + F.smooth_l1_loss(x, z, reduction="sum", beta=0.5),
}


@contextlib.contextmanager
def largest() -> Iterator[list[int]]:
    """Record how many rows of classes the tensors have that are made."""
    found = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in [] if func.is_view else tree_leaves(out):
                if isinstance(t, Tensor) and t.is_floating_point() and CLASSES in t.shape and 8 not in t.shape:
                    found.append(t.numel() // CLASSES)
            return out

    with Sizes():
        yield found


def outcome(
    model: Model,
    loss: Callable[[], Tensor],
    rows: int | None,
    other: Model | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Return a loss, its gradients and the most rows of logits that there were."""
    models = [model] if other is None else [model, other]
    with contextlib.ExitStack() as stack:
        for each in models:
            each.zero_grad()
            lever = None if rows is None else ChunkedLoss(head="head", rows=rows)
            stack.enter_context(switched(each, Levers(microbatch_size=1, chunked_loss=lever)))
        sizes = stack.enter_context(largest())
        stack.enter_context(torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None))
        found = loss()
        with torch.autocast("cpu", enabled=False):
            found.backward()
    gradients = [p.grad.flatten() for each in models for p in each.parameters() if p.grad is not None]
    return found.detach() + 0, torch.cat(gradients), max(sizes)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(CLASSES, (3, 7), generator=generator) for _ in range(2))
    return tokens, targets


@pytest.mark.parametrize("name", DEFERRED)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_functions_of_rows_are_computed_in_chunks(name: str, dtype: torch.dtype | None) -> None:
    model, (tokens, targets) = Model(), batch()

    def loss() -> Tensor:
        return DEFERRED[name](model, model(tokens), targets)

    exact, exact_gradients, _ = outcome(model, loss, None)
    expected, gradients, _ = outcome(model, loss, None, dtype=dtype)
    for rows in (ROWS, 21, 1):
        found, chunked, most = outcome(model, loss, rows, dtype=dtype)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if dtype is None:
            assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
        else:
            assert relative(chunked, exact_gradients) < max(1.5 * relative(gradients, exact_gradients), 1e-2)
        assert most <= max(rows, 3)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("is_trained", [True, False])
def test_two_heads_are_taken_row_by_row(name: str, is_trained: bool) -> None:
    model, other, (tokens, targets) = Model(), Model(bias=False), batch()

    def loss() -> Tensor:
        with torch.set_grad_enabled(is_trained):
            theirs = other(tokens)
        return TWO[name](model(tokens), theirs, targets)

    expected, gradients, _ = outcome(model, loss, None, other)
    found, chunked, most = outcome(model, loss, ROWS, other)
    assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
    assert most <= ROWS

"""A chunked loss gives the loss and the gradients of the whole one, whatever is done with the logits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memfit.errors import PlanError, PlanMismatchError, UsageError
from memfit.hardware import allocated
from memfit.ir import ChunkedLoss
from memfit.levers.chunked_loss import Logits, chunked, is_chunked
from memfit.levers.precision import casting

CLASSES = 11


class LanguageModel(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


Loss = Callable[[Any, Tensor], Tensor]
CHUNKED: dict[str, Loss] = {
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "mean, some ignored": lambda x, y: F.cross_entropy(x.float().view(-1, CLASSES), y.view(-1), ignore_index=3),
    "shifted, smoothed": lambda x, y: F.cross_entropy(
        x[:, :-1].contiguous().view(-1, x.size(-1)), y[:, 1:].reshape(-1), label_smoothing=0.1
    ),
    "classes second": lambda x, y: F.cross_entropy(
        x[..., :-1, :].transpose(1, 2), y[:, 1:], ignore_index=3, label_smoothing=0.2
    ),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "a module": lambda x, y: nn.CrossEntropyLoss()(x.reshape(-1, CLASSES).to(torch.float32), y.flatten()),
    "transformers": lambda x, y: F.cross_entropy(
        x.float().view(-1, CLASSES), F.pad(y, (0, 1), value=-100)[:, 1:].flatten()
    ),
}
WHOLE: dict[str, Loss] = {
    "rows apart": lambda x, y: F.cross_entropy(x.reshape(-1, CLASSES), y.flatten(), reduction="none").mean(),
    "weighted classes": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, 12.0)),
    "another function": lambda x, y: torch.logsumexp(x * 2, -1).mean() + x.argmax(-1).float().mean(),
    "other views": lambda x, y: F.cross_entropy(x[..., 1:].flatten(1)[:, None].mT.flatten(1), y[:, 0]),
    "beside a metric": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) * (x.argmax(-1) == y).float().mean(),
}


class Below(torch.autograd.Function):
    """A loss below PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x.sigmoid())
        return F.softplus(x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


WHOLE["a function of the user's"] = Below.apply


def under(model: nn.Module, lever: ChunkedLoss | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if lever is None else chunked(model, lever)


def loss_and_gradients(
    model: nn.Module, loss: Loss, lever: ChunkedLoss | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(CLASSES, (3, 7), generator=generator) for _ in range(2))
    model.zero_grad()
    with under(model, lever), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        found = loss(model(tokens), targets)
    found.backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_loss(name: str, bias: bool) -> None:
    loss = (CHUNKED | WHOLE)[name]
    model = LanguageModel(bias)
    expected, gradients = loss_and_gradients(model, loss, None)
    found, chunked_gradients = loss_and_gradients(model, loss, ChunkedLoss(head="head", rows=4))
    assert found.dtype == expected.dtype
    assert relative(found, expected) < 1e-6
    assert relative(chunked_gradients, gradients) < 1e-6
    broken = gradients.clone()
    broken[0] += 1e-3 * gradients.norm()
    assert relative(broken, gradients) > 1e-6


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(CHUNKED)),
    rows=st.integers(1, 25),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "embed.weight", "body.weight", "head.bias"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_number_of_rows_and_any_frozen_parameter(
    name: str, rows: int, bias: bool, frozen: str, dtype: torch.dtype
) -> None:
    model = LanguageModel(bias).to(dtype)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(fqn != frozen)
    expected, gradients = loss_and_gradients(model, CHUNKED[name], None)
    found, chunked_gradients = loss_and_gradients(model, CHUNKED[name], ChunkedLoss(head="head", rows=rows))
    tolerance = 1e-5 if "module" in name or "transformers" in name else 10 * torch.finfo(dtype).eps ** 0.9
    assert relative(found, expected) < tolerance
    assert relative(chunked_gradients, gradients) < tolerance


@pytest.mark.parametrize("name", sorted(CHUNKED))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_rounds_no_more_than_the_whole_loss(name: str, dtype: torch.dtype) -> None:
    model = LanguageModel(True)
    _, exact = loss_and_gradients(model, CHUNKED[name], None)
    expected, gradients = loss_and_gradients(model, CHUNKED[name], None, dtype)
    found, chunked_gradients = loss_and_gradients(model, CHUNKED[name], ChunkedLoss(head="head", rows=4), dtype)
    assert found.dtype == expected.dtype
    assert relative(found, expected) < 1e-3
    assert relative(chunked_gradients, exact) < 1.5 * relative(gradients, exact)


@pytest.mark.parametrize("name", sorted(CHUNKED))
def test_logits_are_never_whole(name: str) -> None:
    """The largest tensor of a float dtype is that of a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.dim() and t.shape[-1] == CLASSES]
            sizes.extend(t.numel() for t in made if t.shape != (8, CLASSES))  # the head's weight
            return out

    model = LanguageModel()
    for lever in (None, ChunkedLoss(head="head", rows=2)):
        sizes.clear()
        with Sizes():
            loss_and_gradients(model, CHUNKED[name], lever)
        assert (max(sizes) <= 2 * CLASSES) == (lever is not None)


def test_logits_tell_their_shape_and_give_their_numbers() -> None:
    model, tokens = LanguageModel(), torch.randint(CLASSES, (3, 7))
    expected = model(tokens)
    with chunked(model, ChunkedLoss(head="head", rows=4)):
        logits = model(tokens)
        assert type(logits) is Logits and logits.shape == (3, 7, CLASSES) and logits.requires_grad
        assert (len(logits), logits.dim(), logits.size(-1), logits.dtype) == (3, 3, CLASSES, torch.float32)
        assert type(logits.double().transpose(1, 2)[None]) is Tensor
        torch.testing.assert_close(logits + 0, expected)
        torch.testing.assert_close(logits.transpose(1, 2).exp(), expected.transpose(1, 2).exp())
        torch.testing.assert_close(logits[1, -1].detach(), expected[1, -1].detach())
        assert "tensor" in repr(logits)
        with torch.no_grad():
            assert F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).grad_fn is None


def test_second_backward_pass_is_refused() -> None:
    model, tokens = LanguageModel(), torch.randint(CLASSES, (3, 7))
    with chunked(model, ChunkedLoss(head="head", rows=4)):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="ran twice"):
        loss.backward()


def test_model_is_restored_and_copies_are_their_own() -> None:
    model, lever = LanguageModel(), ChunkedLoss(head="head", rows=4)
    with chunked(model, lever):
        assert is_chunked(model)
        copied = copy.deepcopy(model)
        assert copied.head.forward.module is copied.head  # type: ignore[union-attr]
        with pytest.raises(PlanError, match=r"close\(\)"), chunked(model, lever):
            pass
    assert not is_chunked(model) and "forward" not in model.head.__dict__


def test_casts_stay_around_it() -> None:
    model, tokens = LanguageModel(), torch.randint(CLASSES, (3, 7))
    with casting(model.head, torch.float32, device="cpu"), torch.autocast("cpu", torch.bfloat16):
        with chunked(model, ChunkedLoss(head="head", rows=4)):
            assert is_chunked(model) and model(tokens).dtype is torch.float32
        assert not is_chunked(model) and type(model(tokens)) is Tensor
    assert model.head.__dict__.get("forward") is None


@pytest.mark.parametrize(("head", "error"), [("nowhere", PlanMismatchError), ("embed", PlanError)])
def test_what_is_no_head_is_refused(head: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"'{head}'"), chunked(LanguageModel(), ChunkedLoss(head=head, rows=4)):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("features", "classes", "rows"), [(64, 8192, 32), (96, 12289, 48), (32, 16384, 16)])
def test_the_gradient_of_a_weight_is_made_beside_little_else(
    dtype: torch.dtype, features: int, classes: int, rows: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, classes))
    hidden, targets = torch.randn(4 * rows, features), torch.randint(classes, (4 * rows,))
    peaks, gradients = [], []
    for lever in (None, ChunkedLoss(head="0", rows=rows)):
        model.zero_grad()
        with (
            allocated() as meter,
            under(model, lever),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
        ):
            F.cross_entropy(model(hidden), targets).backward()
        peaks.append(meter.peak_bytes)
        gradients.append(model[0].weight.grad.clone())  # type: ignore[union-attr, operator]
    head_bytes, chunk_bytes = 4 * features * classes, 4 * rows * classes
    rounded = dtype is torch.bfloat16
    parts = 0.15 * head_bytes if rounded else 0  # of the weight's gradient, in two dtypes
    assert peaks[1] <= (1.5 if rounded else 1) * head_bytes + 2.5 * chunk_bytes + parts + 2**17 < peaks[0]
    assert relative(gradients[1], gradients[0]) < (1e-2 if rounded else 1e-6)

"""What is done with each row of logits is done a few rows at a time, and gives what it gives with all of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memfit
from memfit import ir
from memfit.errors import PlanError, UsageError
from memfit.ir import ChunkedLoss, Levers, Plan
from memfit.levers import Switch, applied, switched
from memfit.workload import Workload
from tests.measuring import peaks

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


def selective_log_softmax(x: Any, index: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of chosen classes, in the two ways of TRL's function of that name."""
    x = x / temperature if temperature != 1.0 else x
    is_single = index.dim() == x.dim() - 1
    index = index[..., None] if is_single else index
    if x.dtype in (torch.float32, torch.float64):
        selected = torch.gather(x, dim=-1, index=index)
        logs = selected - torch.stack([torch.logsumexp(row, dim=-1) for row in x]).unsqueeze(-1)
    else:
        rows = [F.log_softmax(row, dim=-1).gather(dim=-1, index=at) for row, at in zip(x, index, strict=True)]
        logs = torch.stack(rows)
    return logs.squeeze(-1) if is_single else logs


def entropy_from_logits(x: Any, chunk_size: int) -> Tensor:
    """Return the entropies, as TRL's function of that name does."""
    parts = []
    for part in x.reshape(-1, x.shape[-1]).split(chunk_size, dim=0):
        logs = F.log_softmax(part, dim=-1)
        parts.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(parts, dim=0).reshape(x.shape[:-1])


def grpo(model: Model, x: Any, y: Tensor) -> Tensor:
    x = x[:, :-1, :] / 0.9
    logs, y = selective_log_softmax(x, y[:, 1:]), y[:, 1:]
    with torch.no_grad():
        old = selective_log_softmax(x, y) - 0.1
        certain = entropy_from_logits(x, chunk_size=5).lt(3.5)
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
    "trl": lambda m, x, y: -selective_log_softmax(x, y, temperature=0.7).mean(),
    "trl, several": lambda m, x, y: selective_log_softmax(x, torch.stack([y, y.flip(0)], -1)).square().sum(),
    "trl, entropy": lambda m, x, y: entropy_from_logits(x, chunk_size=6).mean(),
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


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["trl", "trl, several", "trl, entropy", "grpo"])
def test_trls_own_functions_are_computed_in_chunks(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    for function in ("selective_log_softmax", "entropy_from_logits"):
        monkeypatch.setitem(globals(), function, getattr(utils, function))
    test_functions_of_rows_are_computed_in_chunks(name, dtype)


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


def test_values_that_wait_share_one_product() -> None:
    """Those that are asked for together take four products of the head: two passes, and two gradients."""
    model, (tokens, targets) = Model(bias=False), batch()
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name in ("aten::mm", "aten::addmm_") and any(CLASSES in t.shape for t in args):
                products.append(func)
            return func(*args, **(kwargs or {}))

    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=21))), Products():
        logits: Any = model(tokens)
        selected = logits.gather(-1, targets[..., None]).squeeze(-1)
        log_sums = torch.stack([torch.logsumexp(row, -1) for row in logits])
        (selected - log_sums).sum().backward()
    assert len(products) == 4


def test_rows_without_a_gradient_are_left_out_of_the_backward_pass() -> None:
    model, (tokens, targets) = Model(), batch()
    mask = torch.zeros_like(targets)
    mask[0] = 1
    rows = []

    original = F.linear

    def counting(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows.append(len(hidden))
        return original(hidden, weight, bias)

    def loss() -> Tensor:
        return -(chosen(model(tokens), targets) * mask).sum() / mask.sum()

    _, gradients, _ = outcome(model, loss, None)
    model.zero_grad()
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=7))):
        found = loss()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", counting)
            found.backward()
    assert rows == [7]  # of 21
    chunked = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert relative(chunked, gradients) < 1e-5


@pytest.mark.parametrize("ignored", [0, 3, 15, 21])
def test_ignored_targets_are_left_out_before_the_product(ignored: int) -> None:
    model, (tokens, targets) = Model(), batch()
    targets.view(-1)[torch.randperm(21, generator=torch.Generator().manual_seed(0))[:ignored]] = -100
    products = []
    original = F.linear

    def counting(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append(len(hidden)) if len(weight) == CLASSES else None
        return original(hidden, weight, bias)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    loss().backward()
    expected = loss().detach()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=ROWS))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", counting)
            found = loss()
        found.backward()
    assert len(products) == -(-(21 - ignored) // ROWS)
    chunked = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert ignored == 21 or relative(found.detach(), expected) < 1e-5
    assert ignored == 21 or relative(chunked, gradients) < 1e-5


CHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "divided": lambda x, y: (x.div_(2), chosen(x, y))[1],
    "a view of it": lambda x, y: (x[:, 1:].mul_(3), chosen(x, y))[1],
    "before a view": lambda x, y: [x[:, 1:], x.add_(1), x.sin_()][0].logsumexp(-1),
    "some set": lambda x, y: (x.__setitem__((slice(None), slice(None), 3), -5.0), x.logsumexp(-1))[1],
    "after its use": lambda x, y: [x.sum(-1), x.mul_(2)][0],
    "augmented": lambda x, y: operator.itruediv(x, 2).logsumexp(-1),
    "through an unknown view": lambda x, y: (x.diagonal(0, 0, 1).copy_(torch.ones(CLASSES, 3)), x.logsumexp(-1))[1],
    "through another": lambda x, y: (x.as_strided((3,), (1,)).fill_(4.0), x.logsumexp(-1))[1],
    "a sorted row": lambda x, y: x.sort(-1).values[..., -3:].sum(-1),
    "over tokens": lambda x, y: (x - x.mean(1, keepdim=True)).logsumexp(-1),
    "one token's beside the next": lambda x, y: F.kl_div(x[:, 1:].log_softmax(-1), x[:, :-1].softmax(-1)),
    "chosen tokens": lambda x, y: x[y > 9].logsumexp(-1),
    "the last token": lambda x, y: x[torch.arange(3), y[:, 0] % 7].logsumexp(-1),
    "one row": lambda x, y: x[1, 2].log_softmax(-1)[5],
    "a doubled tensor": lambda x, y: x.detach().double().logsumexp(-1) + x.double().logsumexp(-1),
    "a copy": lambda x, y: copy.copy(x.clone().mul_(2)).logsumexp(-1) + x.logsumexp(-1),
    "an output given": lambda x, y: torch.exp(x, out=None).sum(-1).log(),
    "a matrix product": lambda x, y: (x @ torch.ones(CLASSES, 2)).logsumexp(-1),
    "a hook": lambda x, y: (x.register_hook(lambda grad: 2 * grad), x.logsumexp(-1))[1],
    "a hook of a value": lambda x, y: [v := x.logsumexp(-1), v.register_hook(lambda grad: 2 * grad)][0],
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:reduction. .mean. divides:UserWarning")
def test_anything_else_gets_the_numbers(name: str) -> None:
    model, (tokens, targets) = Model(), batch()

    def loss() -> Tensor:
        return (CHANGES[name](model(tokens), targets) * 1.5).sum()

    expected, gradients, _ = outcome(model, loss, None)
    found, chunked, _ = outcome(model, loss, ROWS)
    assert found.dtype == expected.dtype
    assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.sum(-1) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad[..., None].expand(*grad.shape, CLASSES) * 2


def test_functions_below_pytorchs_get_their_gradients() -> None:
    model, (tokens, _) = Model(), batch()

    def loss() -> Tensor:
        logits: Any = model(tokens)
        return Doubled.apply(torch.tanh(logits / model.temperature)).square().mean()

    expected, gradients, _ = outcome(model, loss, None)
    found, chunked, _ = outcome(model, loss, ROWS)
    assert relative(found, expected) < 1e-5 and relative(chunked, gradients) < 1e-5
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=ROWS))):
        logits: Any = model(tokens)
        logits.mul_(2)
        with pytest.raises(UsageError, match="changed in place"):
            Doubled.apply(logits).sum().backward()


def test_what_changed_before_values_were_asked_for_is_told() -> None:
    model, (tokens, targets) = Model(), batch()
    weights = torch.ones(3, 7)
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=ROWS))):
        value = chosen(model(tokens) * weights[..., None], targets)
        weights.zero_()
        with pytest.raises(UsageError, match="was written to"):
            value.sum()
        value = model(tokens).logsumexp(-1)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(UsageError, match="was written to"):
            value.sum()


def test_backward_passes_may_run_twice_and_modes_are_kept() -> None:
    model, (tokens, targets) = Model(), batch()
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=ROWS))):
        found = chosen(model(tokens), targets).sum()
        (once,) = torch.autograd.grad(found, model.head.weight, retain_graph=True)
        (again,) = torch.autograd.grad(found, model.head.weight)
        assert torch.equal(once, again)
        with torch.no_grad():
            silent = chosen(model(tokens), targets)
        assert not silent.requires_grad and (silent + 0).grad_fn is None
        with torch.inference_mode():
            assert not (chosen(model(tokens), targets) + 0).requires_grad
        assert type(copy.deepcopy(model(tokens).detach())) is Tensor


def losses_of(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the chosen and of the rejected tokens."""
    one, other = (chosen(model(batch[name])[:, :-1], batch[name][:, 1:]).sum(-1) for name in ("chosen", "rejected"))
    return one, other


def preferences(reference: nn.Module) -> Workload:
    """Return a step of direct preference optimization, with a reference in the closure of its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False))
    generator = torch.Generator().manual_seed(0)
    tokens = {name: torch.randint(4096, (2, 150), generator=generator) for name in ("chosen", "rejected")}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            theirs = losses_of(reference, batch)
        ours = losses_of(model, batch)
        return -F.logsigmoid(0.1 * (ours[0] - ours[1] - theirs[0] + theirs[1])).mean()

    return Workload(model, tokens, loss, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_reference_that_the_loss_refers_to_is_chunked_too() -> None:
    reference = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)).requires_grad_(False)
    workload = preferences(reference)
    plain = Levers(microbatch_size=2)
    lever = ChunkedLoss(head="1", rows=128)
    found = {}
    for levers in (plain, *(replace(plain, chunked_loss=replace(lever, others=others)) for others in (False, True))):
        found[levers.chunked_loss] = predicted, measured = peaks(workload, levers)
        assert predicted == pytest.approx(measured, rel=0.005)
    logits_bytes = 2 * 150 * 4096 * 4
    assert found[replace(lever, others=True)][1] < found[lever][1] - 0.9 * logits_bytes
    assert found[lever][1] < found[None][1] - logits_bytes
    plan = memfit.plan(workload, budget=int(0.55 * found[None][0]), precisions=["32-true"], points=1)
    assert plan.levers.chunked_loss == ChunkedLoss(head="1", rows=128, others=True)
    assert memfit.verify(plan, workload, steps=0).failures == []
    assert ir.codec.decode(ir.codec.encode(plan), Plan, source="plan.json") == plan
    assert not any("forward" in module.__dict__ for module in reference.modules())
    with applied(plan.levers, workload):
        assert "forward" in reference[1].__dict__
    with applied(plain, workload) as step, contextlib.closing(Switch(step, plain)) as switch:
        switch.to(plan.levers)
        assert "forward" in reference[1].__dict__
    assert "forward" not in reference[1].__dict__
    with pytest.raises(PlanError, match="others"), switched(workload.model, plan.levers):
        pass


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    "name",
    ["gather", "trl", *(pytest.param(name, marks=pytest.mark.ci) for name in ("entropy", "soft-capped", "some rows"))],
)
def test_peaks_are_predicted_and_as_low_as_with_cross_entropy(name: str, precision: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 4096))
    losses: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "cross entropy": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        "gather": lambda x, y: -chosen(x[:, :-1], y[:, 1:]).mean(),
        "trl": lambda x, y: -selective_log_softmax(x[:, :-1], y[:, 1:]).mean(),
        "entropy": lambda x, y: entropy(x).mean(),
        "soft-capped": lambda x, y: -chosen(30 * torch.tanh(x / 30), y).mean(),
        "some rows": lambda x, y: -chosen(x[:, 40:], y[:, 40:]).mean(),
    }
    lowest = {}
    for each in ("cross entropy", name):
        loss = losses[each]
        workload = Workload(
            model,
            torch.randint(4096, (4, 100)),
            lambda model, batch, loss=loss: loss(model(batch), batch),
            torch.optim.SGD(model.parameters(), lr=0.1),
        )
        levers = Levers(precision=precision, microbatch_size=4, chunked_loss=ChunkedLoss(head="1", rows=64))
        predicted, measured = peaks(workload, levers)
        assert predicted == pytest.approx(measured, rel=0.005)
        lowest[each] = measured
    # Gradients of several functions of a chunk's logits are there at a time.
    chunks = {"gather": 1, "some rows": 1, "trl": 3}.get(name, 4)
    assert lowest[name] <= lowest["cross entropy"] + chunks * 64 * 4096 * 4


def test_a_loss_without_a_softmax_is_found_by_its_head() -> None:
    workload = preferences(nn.Identity())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits: Any = model(batch)
        return (logits.logsumexp(-1) - logits.gather(-1, batch[..., None]).squeeze(-1)).mean()

    workload = dataclasses.replace(workload, batch=torch.randint(4096, (1, 300)), loss_fn=loss)
    budget = int(0.7 * memfit.estimate(workload).peak_bytes)
    plan = memfit.plan(workload, budget=budget, precisions=["32-true"], points=1)
    assert plan.levers.chunked_loss == ChunkedLoss(head="1", rows=128)


def test_arguments_that_were_written_to_before_are_known_by_what_they_are() -> None:
    model, (tokens, targets) = Model(), batch()
    weights = torch.ones(3, 1)
    weights += 1
    with switched(model, Levers(microbatch_size=1, chunked_loss=ChunkedLoss(head="head", rows=ROWS))):
        scaled: Any = model(tokens) * weights[..., None]
        found = chosen(scaled.view(-1, CLASSES), targets.view(-1))
        left = chosen(scaled, targets)
        assert float(found.sum().detach()) == pytest.approx(
            float(chosen(model(tokens) * 2, targets).sum().detach()), rel=1e-5
        )
        other: Any = model(tokens) * weights[..., None]
        old = other.logsumexp(-1)
        weights += 1
        assert model(tokens).logsumexp(-1).isfinite().all()
        with pytest.raises(UsageError, match="was written to"):
            old.sum()
    assert left.shape == (3, 7)

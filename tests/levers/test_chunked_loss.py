"""A chunked loss gives the loss and the gradients of the whole one in less memory, and plans take it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn

import memfit
from memfit import ir
from memfit.capture import real_copy
from memfit.errors import PlanError, PlanMismatchError, UsageError
from memfit.hardware import allocated, find_device
from memfit.ir import ChunkedLoss, Levers, Plan
from memfit.levers import LEVERS, Switch, applied, switched
from memfit.planner import capture_levers
from memfit.recipes import byte_lm
from memfit.workload import Workload
from tests.measuring import peaks

CLASSES = 11
ROWS = ChunkedLoss(head="head", rows=4)
(LEVER,) = (lever for lever in LEVERS if lever.name == "chunked loss")


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
OTHERS: dict[str, Loss] = {
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


OTHERS["a function of the user's"] = Below.apply


def under(model: nn.Module, lever: ChunkedLoss | None) -> contextlib.AbstractContextManager[None]:
    return switched(model, Levers(microbatch_size=1, chunked_loss=lever))


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


@pytest.mark.parametrize("name", [*CHUNKED, *OTHERS])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_loss(name: str, bias: bool) -> None:
    loss = (CHUNKED | OTHERS)[name]
    model = LanguageModel(bias)
    expected, gradients = loss_and_gradients(model, loss, None)
    found, chunked_gradients = loss_and_gradients(model, loss, ROWS)
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
    found, chunked_gradients = loss_and_gradients(model, CHUNKED[name], ROWS, dtype)
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
    with under(model, ROWS):
        logits = model(tokens)
        assert type(logits) is not Tensor and logits.shape == (3, 7, CLASSES) and logits.requires_grad
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
    with under(model, ROWS):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="ran twice"):
        loss.backward()


def test_model_is_restored_and_copies_are_their_own() -> None:
    model = LanguageModel()
    with under(model, ROWS):
        copied = copy.deepcopy(model)
        assert copied.head.forward.module is copied.head  # type: ignore[union-attr]
        with pytest.raises(PlanError, match=r"close\(\)"), under(model, ROWS):
            pass
    assert "forward" not in model.head.__dict__


def test_casts_stay_around_it() -> None:
    model, tokens = LanguageModel(), torch.randint(CLASSES, (3, 7))
    optimizer = torch.optim.SGD(model.parameters())
    workload = Workload(model, tokens, lambda model, batch: model(batch).sum(), optimizer, fp32_modules=("head",))
    levers = Levers(precision="bf16-mixed", microbatch_size=3)
    with applied(levers, workload), torch.autocast("cpu", torch.bfloat16):
        with under(model, ROWS):
            assert LEVER.is_applied(workload)
            assert type(model(tokens)) is not Tensor and model(tokens).dtype is torch.float32
        assert not LEVER.is_applied(workload) and type(model(tokens)) is Tensor
    assert model.head.__dict__.get("forward") is None


@pytest.mark.parametrize(("head", "error"), [("nowhere", PlanMismatchError), ("embed", PlanError)])
def test_what_is_no_head_is_refused(head: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"'{head}'"), under(LanguageModel(), ChunkedLoss(head=head, rows=4)):
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


def large_vocabulary(**options: Any) -> Workload:
    shape = {"n_layer": 1, "d_model": 64, "n_head": 4, "context": 64, "batch_size": 4, "dropout": 0.0}
    return byte_lm(max_bytes=200_000, **{**shape, "vocabulary_size": 32768, **options})


def one_sample() -> Workload:
    """Nothing but a chunked loss saves much of it."""
    return large_vocabulary(context=256, batch_size=1, vocabulary_size=16384)


@pytest.fixture(scope="module")
def plan() -> Plan:
    budget = int(0.7 * memfit.estimate(one_sample()).peak_bytes)
    return memfit.plan(one_sample(), budget=budget, precisions=["32-true"], points=2)


@pytest.mark.parametrize(
    ("tied_embedding", "precision"),
    [
        (True, "32-true"),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (
                (False, "32-true"),
                (False, "bf16-true"),
                (True, "bf16-mixed"),
                (False, "bf16-mixed"),
                (True, "bf16-true"),
            )
        ),
    ],
)
def test_saving_is_predicted(precision: Any, tied_embedding: bool) -> None:
    workload = large_vocabulary(tied_embedding=tied_embedding, vocabulary_size=8192)
    workload = dataclasses.replace(workload, bf16_updates="master-weights")
    plain = Levers(precision=precision, microbatch_size=4)
    predicted, measured = peaks(workload, plain)
    chunked = replace(plain, chunked_loss=ChunkedLoss(head="head", rows=32))
    chunked_predicted, chunked_measured = peaks(workload, chunked)
    assert chunked_predicted == pytest.approx(chunked_measured, rel=0.01)
    assert predicted - chunked_predicted == pytest.approx(measured - chunked_measured, rel=0.05)
    logits_bytes = 4 * 64 * 8192 * 4
    assert measured - chunked_measured > 0.8 * logits_bytes


def test_it_is_chosen_where_nothing_else_fits_and_is_what_the_plan_says(plan: Plan) -> None:
    assert plan.levers.chunked_loss == ChunkedLoss(head="head", rows=128)
    assert plan.classes["chunked loss"] == plan.numerics == "reordered"
    verification = memfit.verify(plan, one_sample(), steps=0)
    assert verification.failures == []
    assert verification.gradient_difference < 1e-6
    assert "128 rows of head at a time" in str(plan)


def test_lower_budgets_combine_it_with_other_levers(plan: Plan) -> None:
    leanest = min(plan.frontier, key=lambda c: c.peak_bytes)
    assert leanest.levers.chunked_loss and leanest.levers.regions
    lower = plan.at(int(1.01 * leanest.held_bytes))
    assert memfit.verify(lower, one_sample(), steps=0).failures == []


def test_plans_from_before_are_read(plan: Plan) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key != "chunked_loss"}
        return [without(item) for item in value] if isinstance(value, list) else value

    whole = replace(plan, levers=replace(plan.levers, chunked_loss=None), frontier=[])
    before = json.dumps(without(json.loads(ir.codec.encode(whole)))).encode()
    assert b"chunked_loss" not in before
    assert ir.codec.decode(before, Plan, source="plan.json") == whole
    assert ir.codec.decode(ir.codec.encode(plan), Plan, source="plan.json") == plan


@pytest.mark.ci
def test_exact_plans_keep_the_loss_whole() -> None:
    plan = memfit.plan(large_vocabulary(), budget="1GiB", numerics="exact", points=1)
    assert {c.levers.chunked_loss for c in plan.frontier} == {None}


@pytest.mark.ci
def test_one_capture_tells_where_it_does_not_matter(captures: list[Levers]) -> None:
    small = byte_lm(n_layer=2, d_model=64, n_head=4, context=64, batch_size=4, max_bytes=200_000)
    memfit.plan(small, budget="1GiB", precisions=["32-true"], points=1)
    found = [levers for levers in captures if not levers.lean]  # which has captures of its own
    assert len(found) == 4 and not any(levers.chunked_loss for levers in found)


@pytest.mark.parametrize(("step_seconds", "expected"), [(1.0, {"32-true"}), (2.0, {"32-true", "bf16-mixed"})])
def test_whole_losses_are_searched_in_all_precisions_where_they_are_faster(
    step_seconds: float, expected: set[str]
) -> None:
    workload, plain = large_vocabulary(batch_size=2, context=128, vocabulary_size=8192), Levers(microbatch_size=2)
    step: Any = SimpleNamespace(
        workload=workload,
        plain=plain,
        precisions=("32-true", "bf16-mixed"),
        trace=lambda levers: capture_levers(workload, levers, find_device("cpu")),
        predicted=lambda levers: SimpleNamespace(
            peak_bytes=2**24, step_seconds=step_seconds if levers.chunked_loss else 1.0
        ),
        allows=lambda levers: True,
        budget_bytes=None,
        tries_all=False,
    )
    wanted = [replace(plain, precision=p, microbatch_size=size) for p in step.precisions for size in (2, 1)]
    found = LEVER.propose(step, wanted)
    assert {levers.precision for levers in found if not levers.chunked_loss} == expected
    assert [replace(levers, chunked_loss=None) for levers in found if levers.chunked_loss] == wanted


def test_logits_that_something_else_asks_for_are_left_alone() -> None:
    workload = large_vocabulary(vocabulary_size=8192)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logs = torch.log_softmax(model(batch["tokens"]).flatten(0, 1), -1)
        return F.nll_loss(logs.flip(0), batch["targets"].flatten())  # of other tokens

    workload = dataclasses.replace(workload, loss_fn=loss)
    plan = memfit.plan(workload, budget="1GiB", precisions=["32-true"], points=1)
    assert {c.levers.chunked_loss for c in plan.frontier} == {None}
    assert any("take the logits of head" in note for note in plan.notes)


def test_a_running_step_is_switched() -> None:
    workload, plain = large_vocabulary(), Levers(microbatch_size=4)
    with applied(plain, workload) as step, contextlib.closing(Switch(step, plain)) as switch:
        loss, gradients = step.gradients(workload.batch)
        switch.to(replace(plain, chunked_loss=ChunkedLoss(head="head", rows=32)))
        assert "forward" in workload.model.head.__dict__
        with switch.lifted():
            assert "forward" not in workload.model.head.__dict__  # type: ignore[operator]
        again, chunked_gradients = step.gradients(workload.batch)
        assert again == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(chunked_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert not any("forward" in module.__dict__ for module in workload.model.modules())


def test_transformers_models_are_chunked() -> None:
    transformers = pytest.importorskip("transformers")
    from examples.gpt2 import loss

    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=4096, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.loss_type = "ForCausalLM"
    batch = {"tokens": torch.randint(4096, (8, 64))}
    gpt2 = Workload(model=model, batch=batch, loss_fn=loss, optimizer=torch.optim.AdamW(model.parameters()))
    plain = Levers(microbatch_size=8)
    chunked = replace(plain, chunked_loss=ChunkedLoss(head="lm_head", rows=96))
    found = []
    for levers in (plain, chunked):
        copied = real_copy(gpt2)
        with applied(levers, copied) as step:
            found.append(step.gradients(copied.batch))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-6)
    (predicted, measured), (lean_predicted, lean_measured) = peaks(gpt2, plain), peaks(gpt2, chunked)
    assert predicted - lean_predicted == pytest.approx(measured - lean_measured, rel=0.05)
    assert measured - lean_measured > 8 * 64 * 4096 * 4

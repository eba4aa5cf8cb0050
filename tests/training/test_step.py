from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memfit.errors import NonFiniteError, UsageError, WorkloadError
from memfit.training import LossScaler, Step, StepOptions
from memfit.workload import Workload
from tests.training.conftest import training_state

WIDTH = 3
Gradients = dict[str, torch.Tensor]


def mlp(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2))
    return model.to(dtype)


def batch_of(samples: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator, dtype=dtype),
        "y": torch.randn(samples, 2, generator=generator, dtype=dtype),
    }


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = ((model(batch["x"]) - batch["y"]) ** 2).mean()
    return loss


def counted_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample counts as often as its weight says."""
    error = ((model(batch["x"]) - batch["y"]) ** 2).sum(dim=1)
    return (error * batch["weight"]).sum(), batch["weight"].sum()


def workload_of(loss_fn: Callable[..., Any], model: nn.Module | None = None, **changes: Any) -> Workload:
    model = mlp() if model is None else model
    fields: dict[str, Any] = {
        "model": model,
        "batch": batch_of(4),
        "loss_fn": loss_fn,
        "optimizer": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1),
    }
    return Workload(**(fields | changes))


def plain_gradients(workload: Workload, batch: Any) -> tuple[float, Gradients]:
    """Return the loss and gradients of the whole batch, by autograd alone."""
    value = workload.loss_fn(workload.model, batch)
    loss = value[0] / value[1] if isinstance(value, tuple) else value
    named = [(name, p) for name, p in workload.model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named])
    return float(loss.detach()), dict(zip((name for name, _ in named), gradients, strict=True))


def assert_close(actual: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    """Equal to the rounding of fp64."""
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-11, atol=1e-13)


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def is_bitwise_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Accumulation


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 9), microbatch_size=st.integers(1, 10))
def test_microbatches_of_a_mean_give_the_gradients_of_the_whole_batch(samples: int, microbatch_size: int) -> None:
    workload, batch = workload_of(mean_loss), batch_of(samples)
    step = Step(workload, StepOptions(microbatch_size=microbatch_size))
    sizes = [len(m["x"]) for m in step.split(batch)]
    assert sum(sizes) == samples and max(sizes) == min(microbatch_size, samples)
    assert_close(step.gradients(batch), plain_gradients(workload, batch))


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any),
    microbatch_size=st.integers(1, 10),
    count_kind=st.sampled_from(["int64", "float64", "int", "one element"]),
)
def test_microbatches_of_unequal_counts_give_the_gradients_of_the_whole_batch(
    weights: list[int], microbatch_size: int, count_kind: str
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss, count = counted_loss(model, batch)
        kinds = {"int64": count, "float64": count.double(), "int": int(count), "one element": count.reshape(1)}
        return loss, kinds[count_kind]

    workload = workload_of(loss_fn)
    batch = batch_of(len(weights)) | {"weight": torch.tensor(weights)}
    assert_close(
        Step(workload, StepOptions(microbatch_size=microbatch_size)).gradients(batch), plain_gradients(workload, batch)
    )


def test_the_comparison_sees_the_mean_of_means() -> None:
    """The mistake of PL#20350: each microbatch normalised by its own count."""
    workload = workload_of(lambda model, batch: counted_loss(model, batch)[0] / counted_loss(model, batch)[1])
    batch = batch_of(3) | {"weight": torch.tensor([1, 1, 5])}
    with pytest.raises(AssertionError):
        assert_close(Step(workload, StepOptions(microbatch_size=1)).gradients(batch), plain_gradients(workload, batch))


def test_gradients_of_scaled_losses_are_unscaled() -> None:
    workload, batch = workload_of(mean_loss), batch_of(5)
    step = Step(workload, StepOptions(microbatch_size=2, scaler=LossScaler()))
    assert_close(step.gradients(batch), plain_gradients(workload, batch))


def test_gradients_of_parameters_outside_the_optimizer_are_right_too() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
    workload = workload_of(counted_loss, model, optimizer=optimizer)
    batch = batch_of(5) | {"weight": torch.tensor([1, 2, 3, 4, 5])}
    step = Step(workload, StepOptions(microbatch_size=2))
    for _ in range(2):
        assert_close(step.gradients(batch), plain_gradients(workload, batch))
    step(batch)
    assert all(p.grad is None for p in model.parameters())


def test_microbatch_losses_in_bf16_add_up() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return mean_loss(model, batch) * 0 + torch.tensor(1.0, dtype=torch.bfloat16)

    workload = workload_of(loss_fn, mlp(torch.bfloat16))
    loss, _ = Step(workload, StepOptions(microbatch_size=1)).gradients(batch_of(300, torch.bfloat16))
    assert loss == pytest.approx(1.0, rel=1e-2)


# A whole batch


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_a_single_microbatch_equals_a_plain_loop_bitwise(counted: bool, max_grad_norm: float | None) -> None:
    def train(planned: bool) -> tuple[list[float], list[torch.Tensor]]:
        model = mlp(torch.float32, dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loss_fn = counted_loss if counted else mean_loss
        batches = [batch_of(4, torch.float32, seed) | {"weight": torch.arange(4)} for seed in range(5)]
        if planned:
            workload = workload_of(
                loss_fn, model, optimizer=optimizer, scheduler=scheduler, max_grad_norm=max_grad_norm
            )
            step = Step(workload)
            losses = [step(batch).loss for batch in batches]
        else:
            losses = []
            for batch in batches:
                optimizer.zero_grad()
                value = loss_fn(model, batch)
                loss = value[0] / value[1] if isinstance(value, tuple) else value
                loss.backward()  # type: ignore[no-untyped-call]
                if max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                scheduler.step()
                losses.append(float(loss.detach()))
        return losses, weights_of(model)

    (planned_losses, planned), (losses, plain) = train(True), train(False)
    assert planned_losses == losses
    assert is_bitwise_equal(planned, plain)
    planned[0].view(torch.int32)[0, 0] += 1
    assert not is_bitwise_equal(planned, plain)


@settings(max_examples=30, deadline=None)
@given(max_grad_norm=st.floats(1e-4, 10), microbatch_size=st.integers(1, 4))
def test_clipping_is_that_of_clip_grad_norm(max_grad_norm: float, microbatch_size: int) -> None:
    seen: list[torch.Tensor] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(p.grad.clone() for g in self.param_groups for p in g["params"])

    model = mlp()
    optimizer = Watched(model.parameters(), lr=0.1)
    step = Step(workload_of(mean_loss, model, optimizer=optimizer, max_grad_norm=max_grad_norm))
    step.change(microbatch_size=microbatch_size)
    expected = [g.requires_grad_(False) for g in step.gradients(batch_of(4))[1].values()]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    result = step(batch_of(4))
    assert result.grad_norm == float(norm)
    assert is_bitwise_equal(seen, expected)


def test_left_over_gradients_are_not_mixed_in() -> None:
    results = []
    for has_left_over in (False, True):
        step = Step(workload_of(mean_loss), StepOptions(microbatch_size=2))
        for parameter in step.workload.model.parameters():
            parameter.grad = torch.ones_like(parameter) if has_left_over else None
        step(batch_of(4))
        results.append(weights_of(step.workload.model))
    assert is_bitwise_equal(*results)


def test_frozen_parameters_stay() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    frozen, trained = weights_of(model[0]), weights_of(model[3])  # type: ignore[index]
    workload = workload_of(mean_loss, model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    step = Step(workload, StepOptions(microbatch_size=3))
    assert step.gradients(batch_of(4))[1].keys() == {"3.weight", "3.bias"}
    step(batch_of(4))
    assert is_bitwise_equal(weights_of(model[0]), frozen)  # type: ignore[index]
    assert not is_bitwise_equal(weights_of(model[3]), trained)  # type: ignore[index]


@pytest.mark.parametrize("last", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_gradients_of_any_precision_are_clipped_bitwise_as_in_a_plain_loop(
    first: torch.dtype, last: torch.dtype
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16).to(first), nn.Tanh(), nn.Linear(16, 2).to(last))

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, nn.Sequential)
        return model[2](model[:2](batch.to(first)).to(last)).float().square().sum()

    plain, batch = made(), torch.randn(8, 4)
    loss_fn(plain, batch).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    model = made()
    workload = Workload(model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=1e-2)
    Step(workload)(batch)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_added_to_the_optimizer_later_are_clipped_and_cleared() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)  # type: ignore[index]
    step = Step(workload_of(mean_loss, model, optimizer=optimizer, max_grad_norm=1e-3))
    optimizer.add_param_group({"params": model[3].parameters()})  # type: ignore[index]
    before = weights_of(model)
    step(batch_of(4))
    moved = torch.cat([(a - b).flatten() for a, b in zip(weights_of(model), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("clip", [None, 1000.0])
def test_sparse_gradients(clip: float | None) -> None:
    model = nn.Embedding(10, 2, sparse=True)
    workload = Workload(
        model=model,
        batch=torch.tensor([1, 1, 3]),
        loss_fn=lambda m, b: (m(b) ** 2).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        max_grad_norm=clip,
    )
    before = model.weight.detach().clone()
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        result = Step(workload, StepOptions(microbatch_size=2))(workload.batch)
    dense = before.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((dense[workload.batch] ** 2).mean(), dense)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)
    if clip is None:  # the norm needs repeated rows added up, which nothing else does
        assert math.isnan(result.grad_norm) and not result.skipped
    else:
        assert result.grad_norm == pytest.approx(float(gradient.norm()))


def test_sparse_gradients_that_are_not_finite_update_nothing() -> None:
    model = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_hook(lambda g: torch.sparse_coo_tensor(g._indices(), g._values() * math.inf, g.shape))
    workload = Workload(model, torch.tensor([1, 1, 3]), lambda m, b: (m(b) ** 2).mean(), optimizer)
    before = model.weight.detach().clone()
    with torch.sparse.check_sparse_tensor_invariants(False), pytest.raises(NonFiniteError):  # type: ignore[no-untyped-call]
        Step(workload)(workload.batch)
    assert torch.equal(model.weight.detach(), before)


def test_the_order_of_phases_and_the_last_result() -> None:
    step = Step(workload_of(mean_loss), StepOptions(microbatch_size=2))
    phases: list[tuple[str, int]] = []
    step.on_phase = lambda phase, index: phases.append((phase, index))
    result = step(batch_of(4))
    assert step.last is result and step.steps == 1 and not result.skipped and result.loss_scale == 1.0
    assert phases == [
        ("optimizer", 0),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", 0),
    ]


# What is wrong


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_updates_nothing(where: str, microbatch_size: int | None) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mean_loss(model, batch)
        return loss * math.nan if where == "loss" else loss + 0 * (model(batch["x"]) * 0).abs().sqrt().sum()

    workload = workload_of(mean_loss, max_grad_norm=1.0)
    step = Step(workload, StepOptions(microbatch_size=microbatch_size))
    step(batch_of(4))
    before = training_state(step)
    object.__setattr__(workload, "loss_fn", loss_fn)
    with pytest.raises(NonFiniteError, match="nothing was updated") as caught:
        step(batch_of(4))
    assert caught.value.step == 1 and math.isnan(caught.value.value)
    assert where == "loss" or "first in 0.weight" in str(caught.value)
    assert training_state(step) == before
    assert all(p.grad is None for p in workload.model.parameters())


ZERO = torch.zeros(())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda loss: None, "returned None: end it with `return loss`"),
        (lambda loss: 1.0, r"returned the number 1\.0, not a tensor: return the loss without .item\(\)"),
        (lambda loss: loss.expand(2), r"a tensor of shape \(2,\): return one number, such as loss.mean\(\)"),
        (lambda loss: (loss, None), "a tensor of shape .* and None: return one scalar tensor, or"),
        (lambda loss: (loss, "3"), "and '3'"),
        (lambda loss: (loss, torch.ones(2)), r"and a tensor of shape \(2,\)"),
        (lambda loss: (loss, loss), "a count without one, its divisor"),
        (lambda loss: (loss, 1, 2), "a tuple: return one scalar tensor, or"),
        (lambda loss: [loss, 1], "a list"),
        (lambda loss: {"loss": loss}, r"a dict: return only the loss, such as output\['loss'\]"),
        (lambda loss: loss.detach(), r"without a gradient: .* without .detach\(\)"),
        (lambda loss: ZERO.clone().requires_grad_(), "depends on no parameter of Workload.optimizer"),
    ],
)
def test_what_is_no_loss_is_an_error(value: Callable[[torch.Tensor], Any], message: str) -> None:
    workload = workload_of(lambda model, batch: value(mean_loss(model, batch)))
    with pytest.raises(WorkloadError, match=message):
        Step(workload)(batch_of(4))


def test_a_mean_and_a_sum_in_one_step_are_an_error() -> None:
    workload = workload_of(lambda m, b: mean_loss(m, b) if len(b["x"]) == 2 else (mean_loss(m, b), 1))
    with pytest.raises(WorkloadError, match="a mean for one microbatch"):
        Step(workload, StepOptions(microbatch_size=2))(batch_of(5))


@pytest.mark.parametrize("microbatch_size", [0, -1])
def test_a_microbatch_has_samples(microbatch_size: int) -> None:
    with pytest.raises(UsageError, match=f"microbatch_size={microbatch_size}"):
        Step(workload_of(mean_loss), StepOptions(microbatch_size=microbatch_size))

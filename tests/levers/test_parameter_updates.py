"""Updates in the backward pass, of offloaded states, and fused: the plain step's weights, with less in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.capture import real_copy
from memfit.errors import InfeasibleError, NonFiniteError, PlanError, WorkloadError
from memfit.ir import ChunkedLoss, Levers, Region
from memfit.levers import applied, check_combination
from memfit.recipes import byte_lm
from memfit.workload import Workload, batch_size_of
from tests.measuring import peaks
from tests.update_settings import update_settings

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}


def workload(optimizer: str = "AdamW", **options: Any) -> Workload:
    made = byte_lm(
        n_layer=2, d_model=32, n_head=2, context=16, batch_size=4, max_grad_norm=None, max_bytes=200_000, **options
    )
    embeddings = [made.model.embed.weight, made.model.positions.weight]
    others = [p for p in made.model.parameters() if all(p is not e for e in embeddings)]
    groups = [{"params": embeddings}, {"params": others, "weight_decay": 0.01}]
    return dataclasses.replace(made, optimizer=OPTIMIZERS[optimizer](groups))


def after(workload: Workload, levers: Levers, steps: int = 3) -> tuple[list[float], list[float], list[Tensor]]:
    """Return losses, gradient norms, and weights with the optimizer's state after some steps."""
    copied = real_copy(workload)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(copied.optimizer, 0.5)
    with torch.random.fork_rng(), applied(levers, dataclasses.replace(copied, scheduler=scheduler)) as step:
        torch.manual_seed(0)
        results = [step(copied.batch) for _ in range(steps)]
    state = [v for p in copied.model.parameters() for v in copied.optimizer.state[p].values()]
    tensors = [*copied.model.parameters(), *(v for v in state if isinstance(v, Tensor))]
    assert all(p.grad is None for p in copied.model.parameters())
    return [r.loss for r in results], [r.grad_norm for r in results], [t.detach() for t in tensors]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("lever", "others"),
    [
        ("in-backward", {}),
        ("in-backward", {"precision": "bf16-mixed"}),
        ("in-backward", {"regions": (Region(("blocks.0",)), Region(("blocks.1.mlp",)))}),
        ("in-backward", {"chunked_loss": ChunkedLoss(head="head", rows=8)}),
        ("offloaded", {}),
        ("offloaded", {"microbatch_size": 2}),
    ],
)
def test_steps_are_bitwise_those_of_the_plain_step(optimizer: str, lever: Any, others: dict[str, Any]) -> None:
    if optimizer != "AdamW" and others.keys() & {"regions", "chunked_loss"}:
        return
    made = dataclasses.replace(workload(optimizer), max_grad_norm=0.5 if lever == "offloaded" else None)
    levers = Levers(**{"microbatch_size": 4, **others})
    found, expected = after(made, replace(levers, **update_settings(lever))), after(made, levers)
    assert found[0] == expected[0]
    assert found[1] == (expected[1] if lever == "offloaded" else pytest.approx(expected[1], rel=1e-6))
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize(
    "regions", [(), pytest.param((Region(("blocks.0",)), Region(("blocks.1",))), marks=pytest.mark.ci)]
)
def test_saving_is_predicted(regions: tuple[Region, ...]) -> None:
    large = byte_lm(n_layer=4, d_model=128, n_head=2, context=32, batch_size=1, max_grad_norm=None, max_bytes=200_000)
    plain = Levers(microbatch_size=1, regions=regions)
    predicted, measured = peaks(large, plain)
    lean_predicted, lean_measured = peaks(large, replace(plain, update="in-backward"))
    assert lean_predicted == pytest.approx(lean_measured, rel=0.01)
    assert predicted - lean_predicted == pytest.approx(measured - lean_measured, rel=0.05)
    gradient_bytes = sum(p.nbytes for p in large.model.parameters())
    assert measured - lean_measured > 0.4 * gradient_bytes


class Wide(nn.Module):
    """Many small parameters around a large one, which gets its gradient between theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Linear(8, 8) for _ in range(40)), nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def wide(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> tuple[Workload, list[int]]:
    """Return a workload, and how many parameters each step of its optimizer updated."""
    updated: list[int] = []
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.SGD.step

    def counted(of: torch.optim.SGD, *arguments: Any) -> Any:
        updated.append(sum(len(group["params"]) for group in of.param_groups))
        return own(of, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)  # a hook of its own would be one of the user's
    if fails:
        model.layers[4].register_full_backward_pre_hook(fail)
    return Workload(model, torch.ones(2, 8), lambda m, x: m(x), optimizer), updated


def fail(*_: Any) -> None:
    raise MemoryError("no room")


def test_small_gradients_wait_and_are_used_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made, updated = wide(monkeypatch)
    parameters = list(made.model.parameters())
    with applied(Levers(microbatch_size=2, update="in-backward"), made) as step:
        most = 0

        def count(_: Any) -> None:
            nonlocal most
            most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None))

        handles = [p.register_post_accumulate_grad_hook(count) for p in parameters]
        step(made.batch)
        for handle in handles:
            handle.remove()
    assert sum(updated) == len(parameters) and len(updated) < len(parameters) / 2
    large = max(p.nbytes for p in parameters)
    assert most <= large + 0.01 * sum(p.nbytes for p in parameters)


def test_an_error_in_the_backward_pass_leaves_no_gradient_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made, updated = wide(monkeypatch, fails=True)
    with applied(Levers(microbatch_size=2, update="in-backward"), made) as step:
        with pytest.raises(MemoryError):
            step(made.batch)
    assert updated  # the error came after some parameters had been updated
    assert all(p.grad is None for p in made.model.parameters())


def test_gradients_are_shown_and_used_by_nobody() -> None:
    made = workload()
    weights = [p.detach().clone() for p in made.model.parameters()]
    with applied(Levers(microbatch_size=4, update="in-backward"), made) as step:
        _, gradients = step.gradients(made.batch)
    assert len(gradients) == len(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in made.model.parameters())


@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (lambda model, batch: model(batch["tokens"]).sum() / 0.0, NonFiniteError, "nothing was updated"),
        (lambda model, batch: (model(batch["tokens"]).sum() * 0.0).sqrt(), NonFiniteError, "are updated already"),
        (lambda model, batch: torch.ones(1, requires_grad=True).sum(), WorkloadError, "no parameter"),
    ],
)
def test_a_loss_or_gradients_that_can_not_be_used_are_told_of(
    loss_fn: Callable[[nn.Module, Any], Tensor], error: type[Exception], text: str
) -> None:
    made = dataclasses.replace(workload(), loss_fn=loss_fn)
    weights = [p.detach().clone() for p in made.model.parameters()]
    with applied(Levers(microbatch_size=4, update="in-backward"), made) as step, pytest.raises(error, match=text):
        step(made.batch)
    unchanged = all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    assert unchanged == ("updated already" not in text)


class Reentrant(nn.Module):
    """Uses one weight in several backward passes within one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.sum()


def test_gradients_that_arrive_in_parts_are_refused() -> None:
    model = Reentrant()
    made = Workload(model, torch.ones(2, 4), lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1))
    with applied(Levers(microbatch_size=batch_size_of(made.batch), update="in-backward"), made) as step:
        with pytest.raises(PlanError, match="got its gradient twice"):
            step(made.batch)


class Moved(TorchDispatchMode):
    """Counts what is copied to the host and back."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"copy_out": 0, "copy_in": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.partition(".")[0]
        if func.namespace == "memfit" and name in self.bytes:
            self.bytes[name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_large_states_are_moved_once_each_way_and_states_that_were_there_go_on() -> None:
    made = workload(vocabulary_size=1024)
    with applied(Levers(microbatch_size=4), made) as step:
        step(made.batch)
    large = sum(v.nbytes for values in made.optimizer.state.values() for v in values.values() if v.nbytes >= 2**16)
    with applied(Levers(microbatch_size=4, optimizer_state="offloaded"), made) as step:
        held = {id(v) for values in made.optimizer.state.values() for v in values.values()}
        with Moved() as moved:
            step(made.batch)
        assert moved.bytes == {"copy_out": large, "copy_in": large}
        assert {id(v) for values in made.optimizer.state.values() for v in values.values()} == held


@pytest.mark.ci
def test_a_training_goes_on_from_either_kind_of_checkpoint(tmp_path: Path) -> None:
    sizes = {"vocabulary_size": 1024}
    plan = memfit.plan(workload(**sizes), budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    offloaded = replace(plan, levers=replace(plan.levers, optimizer_state="offloaded"), frontier=[])
    weights = []
    for folder, first, second in (("a", plan, plan), ("b", offloaded, plan), ("c", plan, offloaded)):
        torch.manual_seed(0)
        memfit.train(first, workload(**sizes), out=tmp_path / folder, steps=2)
        made = workload(**sizes)
        memfit.train(second, made, out=tmp_path / folder, steps=4, resume=True)
        weights.append([p.detach().clone() for p in made.model.parameters()])
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))


FUSED_OPTIMIZERS = {
    **{name: OPTIMIZERS[name] for name in ("AdamW", "Adam, foreach", "SGD")},
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def two_layers(optimizer: str = "AdamW") -> Workload:
    """A few samples through large layers: the optimizer's step is the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return Workload(
        model=model,
        batch=torch.randn(4, 256),
        loss_fn=lambda model, batch: (model(batch) - batch).square().mean(),
        optimizer=FUSED_OPTIMIZERS[optimizer](model.parameters()),
        name="two_layers",
    )


FUSED = Levers(microbatch_size=4, optimizer="fused")


def after_two_steps(workload: Workload, *each: Levers) -> list[Tensor]:
    """Return weights and the optimizer's state after_two_steps two steps under each of some levers."""
    copied = real_copy(workload)
    for levers in each:
        with applied(levers, copied) as step:
            for _ in range(2):
                step(copied.batch)
    parameters = list(copied.model.parameters())
    state = [v for p in parameters for v in copied.optimizer.state[p].values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*parameters, *state)]


@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_weights_and_state_are_the_plain_steps_to_rounding(optimizer: str) -> None:
    workload, plain = two_layers(optimizer), replace(FUSED, optimizer="as-is")
    expected = after_two_steps(workload, plain, plain)
    for each in ((FUSED, FUSED), (plain, FUSED), (FUSED, plain)):  # state goes from one to the other
        for tensor, other in zip(after_two_steps(workload, *each), expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-6)
    moved = [t + 1 for t in expected]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after_two_steps(workload, FUSED, FUSED), moved, rtol=1e-4, atol=1e-6)


def test_the_users_settings_come_back() -> None:
    workload = two_layers("Adam, foreach")
    before = [dict(group, params=None) for group in workload.optimizer.param_groups]
    with applied(FUSED, workload) as step:
        step(workload.batch)
        assert all(group["fused"] for group in workload.optimizer.param_groups)
    assert [dict(group, params=None) for group in workload.optimizer.param_groups] == before


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_saving_of_temporaries_is_predicted_to_the_byte(optimizer: str) -> None:
    workload = two_layers(optimizer)
    (plain, plain_measured), (fused, fused_measured) = (
        peaks(workload, replace(FUSED, optimizer="as-is")),
        peaks(workload, FUSED),
    )
    assert (plain, fused) == (plain_measured, fused_measured)
    assert plain - fused > 0.9 * 1024 * 256 * 4  # about a temporary of the largest parameter's size, at least


def test_a_plan_takes_it_where_nothing_else_fits() -> None:
    workload = two_layers()
    options: dict[str, Any] = {"precisions": ["32-true"], "points": 1, "numerics": "reordered"}
    budget = memfit.estimate(workload).peak_bytes - 1024 * 256 * 4
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, optimizers=(), **options)
    with pytest.raises(InfeasibleError):
        memfit.plan(workload, budget=budget, optimizers=["fused"], **(options | {"numerics": "exact"}))
    plan = memfit.plan(workload, budget=budget, optimizers=["fused"], **options)
    assert plan.levers.optimizer == "fused" and plan.classes == {"fused optimizer": "reordered"}
    found = memfit.verify(plan, workload, steps=0)
    assert found.holds and found.measured_peak_bytes <= budget, found.failures


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, differentiable=True),
    ],
)
def test_it_is_refused_where_there_is_none_to_switch_on(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    workload = two_layers()
    workload = dataclasses.replace(workload, optimizer=optimizer(workload.model.parameters()))
    with pytest.raises(PlanError, match="fused optimizer can't be combined with an optimizer without a fused step"):
        check_combination(FUSED, workload)

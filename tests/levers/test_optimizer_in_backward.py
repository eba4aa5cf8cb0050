"""The optimizer in the backward pass: the plain step's weights, bit by bit, without its gradients in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.capture import real_copy
from memfit.errors import NonFiniteError, PlanError, WorkloadError
from memfit.ir import ChunkedLoss, Levers, Region
from memfit.levers import applied
from memfit.recipes import byte_lm
from memfit.workload import Workload, batch_size_of
from tests.measuring import peaks

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
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_steps_are_bitwise_those_of_the_plain_step(optimizer: str, precision: Any) -> None:
    found, expected = (
        after(workload(optimizer), Levers(precision=precision, microbatch_size=4, optimizer=lever))
        for lever in ("in-backward", "as-is")
    )
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert len(found[2]) == len(expected[2])
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize(
    "others",
    [
        {"regions": (Region(("blocks.0",)), Region(("blocks.1.mlp",)))},
        {"chunked_loss": ChunkedLoss(head="head", rows=8)},
    ],
)
def test_it_combines(others: dict[str, Any]) -> None:
    levers = Levers(microbatch_size=4, **others)
    found, expected = (
        after(workload(), x) for x in (Levers(microbatch_size=4, optimizer="in-backward", **others), levers)
    )
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize(
    "regions", [(), pytest.param((Region(("blocks.0",)), Region(("blocks.1",))), marks=pytest.mark.ci)]
)
def test_saving_is_predicted(regions: tuple[Region, ...]) -> None:
    large = byte_lm(n_layer=4, d_model=128, n_head=2, context=32, batch_size=1, max_grad_norm=None, max_bytes=200_000)
    plain = Levers(microbatch_size=1, regions=regions)
    predicted, measured = peaks(large, plain)
    lean_predicted, lean_measured = peaks(large, replace(plain, optimizer="in-backward"))
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
    with applied(Levers(microbatch_size=2, optimizer="in-backward"), made) as step:
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
    with applied(Levers(microbatch_size=2, optimizer="in-backward"), made) as step:
        with pytest.raises(MemoryError):
            step(made.batch)
    assert updated  # the error came after some parameters had been updated
    assert all(p.grad is None for p in made.model.parameters())


def test_gradients_are_shown_and_used_by_nobody() -> None:
    made = workload()
    weights = [p.detach().clone() for p in made.model.parameters()]
    with applied(Levers(microbatch_size=4, optimizer="in-backward"), made) as step:
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
    with applied(Levers(microbatch_size=4, optimizer="in-backward"), made) as step, pytest.raises(error, match=text):
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
    with applied(Levers(microbatch_size=batch_size_of(made.batch), optimizer="in-backward"), made) as step:
        with pytest.raises(PlanError, match="got its gradient twice"):
            step(made.batch)

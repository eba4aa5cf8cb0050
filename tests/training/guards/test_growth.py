"Memory that grows From step to step is noticed, with the variable that holds it and the line that adds to it."

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memfit.training import Growth

STEPS = 14


class Patient(Growth):
    """A watch for which the clock of a busy machine decides nothing."""

    free_seconds = 1e9


def watched(budget: int = 2**26, kind: type[Growth] = Patient) -> tuple[Growth, list[str]]:
    told: list[str] = []
    return kind(torch.device("cpu"), lambda: (budget, 2**23), told.append), told


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(512, 64)


def appended_losses(growth: Growth) -> None:
    model, x = made()
    losses = []
    for _ in range(STEPS):
        out = model(x)
        out.square().mean().backward()
        losses.append((out.softmax(1) * out).mean())
        growth.stepped()


def summed_metric(growth: Growth) -> None:
    model, x = made()
    running = torch.zeros(())
    for _ in range(STEPS):
        out = model(x)
        out.square().mean().backward()
        running = running + out.detach().requires_grad_().exp().mean()
        growth.stepped()


def hidden_state(growth: Growth) -> None:
    cell, x = nn.GRUCell(64, 64), torch.randn(512, 64)
    h = torch.zeros(512, 64)
    for _ in range(STEPS):
        h = cell(x, h)
        growth.stepped()
    assert h.requires_grad


class Kept:
    """Keeps outputs on an object."""

    def __init__(self) -> None:
        self.features: deque[torch.Tensor] = deque()
        self.model, self.x = made()

    def run(self, growth: Growth) -> None:
        for _ in range(STEPS):
            self.features.append(self.model(self.x).detach())
            growth.stepped()


def on_an_object(growth: Growth) -> None:
    Kept().run(growth)


def concatenated(growth: Growth) -> None:
    seen = torch.zeros(0, 64)
    for _ in range(STEPS):
        seen = torch.cat([seen, torch.randn(2048, 64)])
        growth.stepped()


def transitions(growth: Growth) -> None:
    memory = {}
    for step in range(STEPS):
        memory[step] = (torch.randn(256, 64), {"action": torch.randn(256, 64)})
        growth.stepped()


@pytest.mark.parametrize(
    ("loop", "name", "line"),
    [
        (appended_losses, "losses", "losses.append("),
        (summed_metric, "running", "running = running"),
        (hidden_state, "h", "h = cell("),
        (on_an_object, "self.features", "self.features.append("),
        (concatenated, "seen", "seen = torch.cat"),
        (transitions, "memory", "memory[step] = "),
    ],
)
def test_what_grows_is_named_once_with_its_line(loop: Callable[[Growth], None], name: str, line: str) -> None:
    growth, told = watched()
    loop(growth)
    assert len(told) == 1, told
    assert f"`{name}`" in told[0] and "a step" in told[0] and "From step" in told[0]
    number = int(told[0].split("test_growth.py:")[1].split(")")[0].split(",")[0])
    with open(__file__) as file:
        assert line in file.read().splitlines()[number - 1]


def steady(growth: Growth) -> None:
    model, x = made()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3 * STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        growth.stepped()


def varying(growth: Growth) -> None:
    model, _ = made()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3 * STEPS):
        x = torch.randn(int(torch.randint(64, 1024, (), generator=generator)), 64)
        loss = model(x).square().mean()
        loss.backward()
        growth.stepped()


@pytest.mark.parametrize("loop", [steady, varying])
def test_loops_that_hold_no_more_are_told_nothing(loop: Callable[[Growth], None]) -> None:
    growth, told = watched()
    loop(growth)
    assert not told


@pytest.mark.parametrize(
    ("slope", "grows_until", "told_in_all"),
    [(2**20, 9, 0), (2**20, 10**6, 1), (2**15, 100, 0), (2**15, 10**6, 1)],
    ids=["soon full", "large", "a library's cache", "small"],
)
def test_what_no_variable_holds_is_told_only_if_it_grows_on(slope: int, grows_until: int, told_in_all: int) -> None:
    class Reported(Patient):
        def bytes_in_use(self) -> int:
            return slope * min(step, grows_until)

    step = 0
    growth, told = watched(kind=Reported)
    for step in range(40 * STEPS):  # noqa: B007 - read above
        growth.stepped()
    assert len(told) == told_in_all
    assert all("memfit did not find the variable" in line for line in told)


def test_the_step_that_exceeds_the_budget_is_foretold() -> None:
    growth, told = watched(budget=2**23 + 10 * 2**20)
    kept = []
    for _ in range(STEPS):
        kept.append(torch.zeros(2**18))  # 1 MiB
        growth.stepped()
    assert "1.0 MiB a step" in told[0]
    assert "From step 12 on" in told[0] or "From step 13 on" in told[0]


def test_sampling_ends_where_it_would_take_more_than_its_share_of_the_time() -> None:
    class Impatient(Growth):
        free_seconds = -1.0

        def bytes_in_use(self) -> int:
            raise AssertionError("sampled")

    growth, _ = watched(kind=Impatient)
    for _ in range(STEPS):
        growth.stepped()

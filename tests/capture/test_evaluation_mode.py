"""Notes on modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.workload import Workload
from tests.models import captured, squared_error


class DropPath(nn.Module):
    """Stochastic depth, whose mode is read within a function of its own."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def kept() -> torch.Tensor:
            return x if not self.training else x * torch.rand(len(x), 1).ge(self.drop_prob)

        return kept()


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) if self.training else x


class Scores(nn.Module):
    """Attention with a rate that a functional call takes, as transformers' layers have."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.softmax(-1), self.attention_dropout if self.training else 0.0)


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


MODULES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "dropout": (lambda: nn.Dropout(0.1), True),
    "no dropout": (lambda: nn.Dropout(0.0), False),
    "batch norm": (lambda: nn.BatchNorm1d(4), True),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), False),
    "drop path": (lambda: DropPath(0.1), True),
    "no drop path": (lambda: DropPath(0.0), False),
    "noise": (Noisy, True),
    "a rate": (lambda: Scores(0.1), True),
    "no rate": (lambda: Scores(0.0), False),
    "plain": (Plain, False),
    "layer norm": (lambda: nn.LayerNorm(4), False),
    "randomized relu": (nn.RReLU, True),
}


def workload_of(module: nn.Module) -> Workload:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(module))
    return Workload(
        model, (torch.ones(2, 4), torch.ones(2, 4)), squared_error, torch.optim.SGD(model.parameters(), 0.1)
    )


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_heed_their_mode_are_named_where_they_evaluate(name: str) -> None:
    made, heeds = MODULES[name]
    workload = workload_of(made())
    assert not captured(workload).notes
    workload.model.eval()
    notes = captured(workload).notes
    assert len(notes) == heeds and all("1.0" in note and "call model.train() first" in note for note in notes)
    workload.model.train()
    workload.model[1].eval()  # type: ignore[index]  # on purpose, as a frozen normalisation
    notes = captured(workload).notes
    assert len(notes) == heeds and not any("model.train()" in note for note in notes)


def test_a_captured_step_says_so_and_stays_as_it_is() -> None:
    workload = workload_of(nn.Dropout(0.5))
    trained = captured(workload)
    workload.model.eval()
    evaluated = captured(workload)
    assert [note for note in evaluated.notes if "evaluation mode" in note] and not trained.notes
    draws = [sum(op.random for op in trace.ops) for trace in (trained, evaluated)]
    assert draws[0] > draws[1] == 0 and not any(module.training for module in workload.model.modules())

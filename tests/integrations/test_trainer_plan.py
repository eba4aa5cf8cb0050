"""What trainers give to the model is held against what was planned for, whichever trainer it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.integrations import TrainerPlan
from memfit.workload import Workload


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(input_ids)).mT, labels)


def given(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 20, (samples, length))
    return {"input_ids": ids, "labels": ids.clone()}


def test_a_larger_batch_is_told_once_and_smaller_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    model = Reader()
    workload = Workload(model, given(8, 16), lambda m, b: m(**b), torch.optim.SGD(model.parameters(), 0.1))

    class Told(TrainerPlan):
        advice = "give batch= the largest"

    fitted = Told(workload, budget="1GiB", precisions=["32-true"], numerics="exact", points=1)
    model(**given(64, 64))  # before it trains
    fitted.checkpoint(model)
    model(**given(8, 16), count=torch.tensor(3))
    model(**given(4, 9))
    with torch.no_grad():
        model(**given(64, 64))
    model.eval()(**given(64, 64))
    model.train()
    assert not fitted.events
    model(**given(8, 24))
    model(**given(8, 20))
    model(**given(9, 16))
    assert [kind for kind, _ in fitted.events] == ["larger batch"] * 2
    texts = [text for _, text in fitted.events]
    assert "8x24, and the plan is for 8x16" in texts[0] and "9x16" in texts[1] and "give batch= the largest" in texts[0]
    assert [record.getMessage() for record in caplog.records if "larger batch" in record.getMessage()] == [
        f"larger batch: {text}" for text in texts
    ]
    fitted.close()
    model(**given(64, 64))
    assert len(fitted.events) == 2 and not model._forward_pre_hooks


def test_a_trainer_tells_its_plan_as_every_other_answer(capsys: pytest.CaptureFixture[str]) -> None:
    model = Reader()
    workload = Workload(model, given(8, 16), lambda m, b: m(**b), torch.optim.SGD(model.parameters(), 0.1))
    fitted = TrainerPlan(workload, budget="1GiB", precisions=["32-true"], numerics="exact", points=1)
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("memfit: ")]
    assert len(said) == 1 and said[0].startswith("memfit: Fits as it is: ") and "of 1 GiB." in said[0]
    assert str(fitted.plan).splitlines()[1:] == lines[lines.index(said[0]) + 1 :]

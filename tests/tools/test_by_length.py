"""Microbatches of samples sorted by length: the same training to rounding, of fewer tokens, predicted as it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.capture import real_copy
from memfit.errors import WorkloadError
from memfit.ir import Levers
from memfit.levers import applied
from memfit.tools import ByLength
from memfit.workload import Workload
from tests.measuring import peaks

LENGTHS = (60, 15, 11, 8, 25, 5, 20, 10)
TOKENS, WORDS = 64, 50
BY_LABELS = ByLength("labels", -100)


class Masked(nn.Module):
    """A layer of attention that keeps to the samples' own tokens, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 32), nn.Embedding(TOKENS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        out: torch.Tensor = self.head(self.layer(hidden, src_key_padding_mask=mask == 0))
        return out


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["input_ids"], batch["attention_mask"]), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def padded(**options: Any) -> Workload:
    torch.manual_seed(0)
    mask = (torch.arange(TOKENS) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    ids = torch.randint(1, WORDS, mask.shape) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
    model = Masked()
    return Workload(model, batch, loss_of, torch.optim.AdamW(model.parameters()), name="padded", **options)


@pytest.mark.parametrize("split", [ByLength(), BY_LABELS, ByLength("input_ids")], ids=["mask", "labels", "ids"])
def test_microbatches_hold_each_sample_once_and_no_padding_that_all_have(split: ByLength) -> None:
    batch = padded().batch | {"weight": torch.arange(8.0), "scale": torch.tensor(2.0), "names": [*"abcdefgh"]}
    parts = [split(batch, start, min(start + 3, 8)) for start in range(0, 8, 3)]
    assert [tuple(part["input_ids"].shape) for part in parts] == [(3, 60), (3, 15), (2, 8)]
    assert torch.cat([part["weight"] for part in parts]).tolist() == [0, 4, 6, 1, 2, 7, 3, 5]
    assert [name for part in parts for name in part["names"]] == [*"aegbchdf"]
    for part in parts:
        assert part["scale"] == 2.0
        for row, sample in enumerate(part["weight"].long().tolist()):
            for name in ("input_ids", "attention_mask", "labels"):
                assert torch.equal(part[name][row], batch[name][sample, : part[name].shape[1]])
                assert batch["attention_mask"][sample, part[name].shape[1] :].sum() == 0


def test_gradients_are_those_of_the_padded_batch_to_rounding() -> None:
    found = []
    for options in ({}, {"split": ByLength()}):
        copied = real_copy(padded(**options))
        with applied(Levers(microbatch_size=2), copied) as step:
            found.append(step.gradients(copied.batch))
    (loss, gradients), (other_loss, others) = found
    assert abs(loss - other_loss) <= 1e-5 * abs(loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_what_is_predicted_is_what_cut_microbatches_hold() -> None:
    plain, _ = peaks(padded(), Levers(microbatch_size=4))
    predicted, measured = peaks(padded(split=ByLength()), Levers(microbatch_size=4))
    assert abs(predicted - measured) <= 0.005 * measured
    assert predicted < plain


@pytest.mark.ci
def test_a_plan_holds_and_is_faster() -> None:
    sorted_ = padded(split=ByLength())
    budget = memfit.estimate(sorted_, microbatch_size=2).peak_upper_bytes
    plan = memfit.plan(sorted_, budget=budget, precisions=["32-true"], points=1)
    assert plan.levers.microbatch_size < 8 and plan.classes["microbatches"] == "reordered"
    found = memfit.verify(plan, sorted_, steps=1)
    assert found.holds, found.failures
    as_padded = memfit.estimate(padded(), microbatch_size=2)
    assert memfit.estimate(sorted_, microbatch_size=2).step_seconds < as_padded.step_seconds


def test_samples_of_nothing_keep_a_token() -> None:
    batch = {"attention_mask": torch.zeros(4, 8, dtype=torch.long)}
    assert ByLength()(batch, 0, 2)["attention_mask"].shape == (2, 1)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"input_ids": torch.ones(4, 8)}, r"no tensor 'attention_mask' of samples × tokens.*ByLength\(entry="),
        (torch.ones(4, 8), "no tensor 'attention_mask'"),
        ({"attention_mask": torch.ones(4, 1, 8, 8)}, "no tensor 'attention_mask'"),
        ({"attention_mask": torch.ones(4, 8), "bias": torch.ones(4, 1, 8, 8)}, r"\(4, 1, 8, 8\).*another dimension"),
    ],
)
def test_what_can_not_be_cut_is_refused_by_name(batch: Any, match: str) -> None:
    with pytest.raises(WorkloadError, match=match):
        ByLength()(batch, 0, 2)


def test_a_note_names_it() -> None:
    found = [note for note in memfit.estimate(padded()).notes if "padding" in note]
    assert len(found) == 1 and "memfit.tools.ByLength()" in found[0]
    sorted_ = memfit.estimate(padded(split=ByLength()))
    assert not any("are padding" in note for note in sorted_.notes)
    whole = dataclasses.replace(padded(), batch={**padded().batch, "attention_mask": torch.ones(8, TOKENS).long()})
    assert not any("padding" in note for note in memfit.estimate(whole).notes)

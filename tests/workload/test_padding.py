"""Padding of batches: found, counted, and told with what sorting and packing would leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.workload import Workload, padding_note, padding_of

LENGTHS = (500, 120, 90, 60, 200, 40, 150, 80)


def masked(lengths: tuple[int, ...] = LENGTHS, tokens: int = 512, *, left: bool = False) -> dict[str, torch.Tensor]:
    places = torch.arange(tokens).flip(0) if left else torch.arange(tokens)
    mask = (places < torch.tensor(lengths).unsqueeze(1)).long()
    return {"input_ids": torch.where(mask == 1, torch.randint(1, 9, mask.shape), 0), "attention_mask": mask}


def labelled(prompt: int = 0) -> dict[str, torch.Tensor]:
    batch = masked()
    mask = batch.pop("attention_mask")
    labels = torch.where(mask == 1, batch["input_ids"], -100)
    labels[:, :prompt] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize(
    ("batch", "source"),
    [
        (masked(), "attention_mask"),
        (masked(left=True), "attention_mask"),
        ({"attention_mask": masked()["attention_mask"].bool()}, "attention_mask"),
        (labelled(), "labels"),
        (labelled(prompt=30), "labels"),  # a prompt is no padding
    ],
)
def test_lengths_are_those_without_padding(batch: Any, source: str) -> None:
    found = padding_of(batch)
    assert found is not None and found.lengths == LENGTHS
    assert (found.tokens, found.total, found.source) == (512, 4096, source)
    assert round(found.share, 3) == 0.697


def test_what_sorting_leaves_is_what_cut_microbatches_hold() -> None:
    found = padding_of(masked())
    assert found is not None
    order = sorted(LENGTHS)
    assert found.sorted_tokens(1) == sum(LENGTHS) == 1240
    assert found.sorted_tokens(8) == 8 * 500
    assert found.sorted_tokens(2) == sum(2 * max(order[i : i + 2]) for i in range(0, 8, 2))
    assert found.sorted_tokens(3) == 3 * 500 + 3 * 120 + 2 * 60


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(8, 512),
        [masked()],
        {"input_ids": torch.ones(8, 512, dtype=torch.long)},
        {"attention_mask": torch.ones(8, 512)},  # to be added to scores
        {"attention_mask": torch.ones(8, 1, 512, 512, dtype=torch.long)},
        {"attention_mask": torch.ones(8, 512, dtype=torch.long, device="meta")},
        {
            **labelled(),
            "input_ids": torch.arange(4096).view(8, 512),
        },  # targets are left out, and tokens are not padding
        {**labelled(), "input_ids": torch.ones(8, 512, dtype=torch.long)[:4]},
    ],
)
def test_nothing_is_said_where_nothing_tells(batch: Any) -> None:
    assert padding_of(batch) is None and padding_note(batch) is None


def test_little_padding_is_not_told() -> None:
    assert padding_note(masked((512, 512, 420, 500))) is None
    assert padding_note(masked((0, 0))) is None
    assert padding_note(masked((512, 100))) is not None


def test_a_note_has_what_would_be_left() -> None:
    note = padding_note(masked())
    assert note is not None
    for part in (
        "70% of the batch's 4,096 tokens are padding (by its attention_mask)",
        "cut to their longest, 4,000",
        "4 microbatches of 2, each cut to its longest, 1,600",
        "packed one after the other, 1,240",
    ):
        assert part in note
    single = padding_note(masked((100,)))
    assert single is not None and "sorted by length into" not in single


def test_estimates_and_plans_tell() -> None:
    model = nn.Embedding(9, 4)
    workload = Workload(
        model, masked((30, 8, 5, 4), 32), lambda m, b: m(b["input_ids"]).sum(), torch.optim.SGD(model.parameters())
    )
    said = "63% of the batch's 128 tokens are padding"
    assert [said in note for note in memfit.estimate(workload).notes].count(True) == 1
    plan = memfit.plan(workload, budget="1GiB", numerics="exact", points=1)
    assert [said in note for note in plan.notes].count(True) == 1
    whole = Workload(model, masked((32, 32), 32), workload.loss_fn, workload.optimizer)
    assert not any("padding" in note for note in memfit.estimate(whole).notes)

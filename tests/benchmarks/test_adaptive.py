"""The data of the benchmark of plans that adapt are what it says."""

from __future__ import annotations

import itertools

import torch

from benchmarks.adaptive import BATCH, ROUND, grouped_batches, loss_sum_and_count, padded
from memfit.recipes import ByteLM

FUNCTIONS = [b"x" * n + b"\n" for n in range(5, 129)]  # cut to a byte more than the context


def test_padding_counts_for_nothing() -> None:
    torch.manual_seed(0)
    model = ByteLM(1, 16, 2, 64)
    short = [b"def f(x):\n", b"return 1"]
    with torch.no_grad():
        one, count = loss_sum_and_count(model, padded(short, 9))
        other, same = loss_sum_and_count(model, padded(short, 64))
    assert int(count) == int(same) == sum(len(text) - 1 for text in short)
    torch.testing.assert_close(one, other)


def test_batches_are_of_functions_of_like_lengths() -> None:
    batches = list(itertools.islice(grouped_batches(FUNCTIONS, 128, seed=1), 50))
    for batch in batches:
        length = batch["tokens"].shape[1]
        assert batch["tokens"].shape == batch["targets"].shape == (BATCH, length)
        assert length % ROUND == 0 and length <= 128
        assert int((batch["targets"] >= 0).sum(1).max()) > length - ROUND
    assert len({batch["tokens"].shape[1] for batch in batches}) == 4
    again = next(grouped_batches(FUNCTIONS, 128, seed=1))
    assert torch.equal(again["tokens"], batches[0]["tokens"])

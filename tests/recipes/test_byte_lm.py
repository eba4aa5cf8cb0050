from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.recipes import ByteLM, even_windows, python_source, source_files
from tests.recipes.test_recipes import SMALL
from tests.recipes.test_recipes import small as recipe

small = functools.partial(recipe, "byte_lm")


def assert_same_batches(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == {"tokens", "targets"}
        assert all(torch.equal(a[name], b[name]) for name in a)


# Data


def test_no_file_is_in_both_parts_and_no_test_or_package_in_either() -> None:
    training, validation = set(source_files("training")), set(source_files("validation"))
    assert not training & validation
    assert 0.05 < len(validation) / len(training | validation) < 0.2
    parts = {part for file in training | validation for part in file.parts}
    assert not {"test", "tests", "site-packages", "__pycache__", "encodings"} & parts and "argparse.py" in parts


def test_source_is_the_files_in_order() -> None:
    first = source_files("validation")[0].read_bytes()
    source = python_source("validation", 10_000)
    assert source.dtype == torch.uint8
    assert bytes(source[: len(first)].tolist()) == first[:10_000]
    assert len(source) == 10_000


def test_targets_are_the_next_tokens_of_the_training_source() -> None:
    batch = small().batch
    assert batch["tokens"].shape == batch["targets"].shape == (4, 32)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    source = bytes(python_source("training", SMALL["byte_lm"]["max_bytes"]).tolist())
    assert all(bytes(window.tolist()) in source for window in batch["tokens"])


def test_even_windows_stay_within_the_source() -> None:
    source = torch.arange(12, dtype=torch.uint8)
    windows = even_windows(source, 3, context=4)
    assert windows["tokens"][:, 0].tolist() == [0, 2, 5]
    assert even_windows(source, 100, context=11)["targets"][-1].tolist() == list(range(1, 12))


# Position


def test_batches_depend_on_seed_and_epoch_only() -> None:
    one, other = small(), small()
    first_epoch, second_epoch = list(one.batches), list(one.batches)
    assert len(first_epoch) == 6
    assert_same_batches([small().batch], first_epoch[:1])
    assert_same_batches(first_epoch + second_epoch, list(other.batches) + list(other.batches))
    starts = {tuple(window.tolist()) for batch in first_epoch + second_epoch for window in batch["tokens"]}
    assert len(starts) == 48
    assert not torch.equal(small(seed=1).batch["tokens"], first_epoch[0]["tokens"])


@pytest.mark.parametrize("n_used", [0, 1, 5, 6, 7, 12])
def test_resuming_gives_the_remaining_batches(n_used: int) -> None:
    def endless(workload: Any) -> Any:
        return itertools.chain.from_iterable(itertools.repeat(workload.batches))

    interrupted, resumed, whole = small(), small(), small()
    list(itertools.islice(endless(interrupted), n_used))
    resumed.batches.load_state_dict(interrupted.batches.state_dict())
    expected = list(itertools.islice(endless(whole), n_used + 8))[n_used:]
    assert_same_batches(list(itertools.islice(endless(resumed), 8)), expected)


def test_position_of_other_batches_is_refused() -> None:
    batches = small().batches
    with pytest.raises(UsageError, match="seed=5"):
        batches.load_state_dict({"seed": 5, "epoch": 0, "index": 0})
    with pytest.raises(UsageError, match="batches_per_epoch=6"):
        batches.load_state_dict({"seed": 0, "epoch": 0, "index": 7})


# Model and loss


def test_module_names() -> None:
    block = ("norm1", "attention.qkv", "attention.proj", "norm2", "mlp.fc", "mlp.act", "mlp.proj")
    names = {"embed", "positions", "norm", "head", *(f"blocks.1.{name}" for name in block)}
    assert names <= dict(small().model.named_modules()).keys()


def test_embedding_is_tied_unless_told_otherwise() -> None:
    tied, untied = small().model, small(tied_embedding=False).model
    assert tied.head.weight is tied.embed.weight
    n_tied, n_untied = (sum(p.numel() for p in model.parameters()) for model in (tied, untied))
    assert n_untied - n_tied == 256 * 32


def test_later_bytes_do_not_reach_earlier_logits() -> None:
    model = small().model.eval()
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20] = 200
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert torch.all(difference[:20] == 0)
    assert torch.all(difference[20:] > 0)


def test_loss_is_a_sum_over_tokens() -> None:
    workload = small(dropout=0.0)
    whole, count = workload.loss_fn(workload.model, workload.batch)
    assert count == 4 * 32
    whole.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in workload.model.parameters())
    whole = whole.detach()
    assert float(whole) / count == pytest.approx(math.log(256), rel=0.05)
    halves = [{name: tensor[part] for name, tensor in workload.batch.items()} for part in (slice(2), slice(2, 4))]
    assert sum(workload.loss_fn(workload.model, half)[0].item() for half in halves) == pytest.approx(float(whole))


def test_dropout_acts_in_training_only() -> None:
    workload = small(dropout=0.5)
    torch.manual_seed(0)
    model, tokens = workload.model, workload.batch["tokens"]
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_evaluation_does_not_depend_on_the_batch_size() -> None:
    with torch.no_grad():
        one, other = (w.evaluate(w.model.eval()) for w in (small(batch_size=3), small(batch_size=10)))
    assert one["validation_loss"] == pytest.approx(other["validation_loss"])
    assert one["bits_per_byte"] == pytest.approx(one["validation_loss"] / math.log(2))


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="9 bytes is longer than context=8"):
        ByteLM(1, 8, 1, 8)(torch.zeros(1, 9, dtype=torch.int64))

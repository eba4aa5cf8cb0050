"""What memfit relies on of private symbols of transformers and accelerate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from memfit._torch import fake_ranks
from memfit.integrations.internals import forget_accelerator_state, fully_sharded_modules


def test_a_trainers_next_loader_has_the_batch_size_that_is_set(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, report_to=[], use_cpu=True, remove_unused_columns=False
    )
    data = [{"x": torch.zeros(2)} for _ in range(12)]
    trainer = Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=data)
    assert trainer._train_batch_size == 8
    trainer._train_batch_size = 3
    assert len(next(iter(trainer.get_train_dataloader()))["x"]) == 3
    assert arguments.per_device_train_batch_size == 8


def test_another_accelerator_has_a_precision_of_its_own() -> None:
    forget_accelerator_state()
    assert Accelerator(mixed_precision="no", cpu=True).mixed_precision == "no"
    with pytest.raises(ValueError, match="AcceleratorState"):
        Accelerator(mixed_precision="bf16", cpu=True)
    forget_accelerator_state()
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16"
    forget_accelerator_state()


@pytest.mark.parametrize("tied", [False, True])
def test_accelerate_shards_the_modules_that_are_told(tied: bool) -> None:
    import transformers
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule

    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, tie_word_embeddings=tied
    )
    model = transformers.GPT2LMHeadModel(config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    units, kept = fully_sharded_modules(plugin, model)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True, torch_device_mesh=None
    )
    with fake_ranks(2):
        fsdp2_prepare_model(accelerator, model)
        sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    tail = {"transformer.ln_f", "lm_head"}
    assert set(kept) == (set() if tied else tail)
    assert sharded - set(units) == {"", *({*tail, "transformer.wte"} if tied else set())}
    assert set(units) - set(kept) == {"transformer.h.0", "transformer.h.1"} | (set() if tied else {"transformer.wte"})

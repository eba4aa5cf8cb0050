"""memfit inside the Trainer of Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from memfit.apply.checkpoint import is_checkpointed
from memfit.errors import InfeasibleError, UsageError
from tests.apply.steps import Chain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    from memfit.integrations.lightning import MemfitCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning's own


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chain = Chain(dim=32, blocks=3)
        for module in self.chain.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        self.losses: list[float] = []
        self.was_checkpointed = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss: torch.Tensor = torch.nn.functional.cross_entropy(self.chain(x).float(), y)
        self.log("loss", loss)
        self.was_checkpointed = is_checkpointed(self)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(128, 32, generator=generator), torch.randint(0, 3, (128,), generator=generator))


def fitted(folder: Path, batch_size: int, **arguments: Any) -> Any:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    module = arguments.pop("module", None) or Module()
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=folder, **quiet, **arguments)
    trainer.fit(module, DataLoader(data(), batch_size=batch_size))
    return module, trainer


@pytest.mark.parametrize(
    ("precision", "numerics", "size"),
    [("32-true", "exact", 64), ("32-true", "reordered", 32), ("bf16-mixed", "reduced", 8)],
)
def test_a_trainer_trains_as_before_within_a_budget(tmp_path: Path, precision: str, numerics: str, size: int) -> None:
    plain, trainer = fitted(tmp_path, size)
    module = Module()
    batch = data()[:size]
    options = {"numerics": numerics, "precisions": [precision], "points": 1, "time_limit_seconds": 0.5}
    with pytest.raises(InfeasibleError) as caught:
        MemfitCallback(module, batch, budget=1, **options)
    memory = MemfitCallback(module, batch, budget=caught.value.lowest_peak_bytes, **options)
    assert numerics == "reduced" or (memory.microbatch_size < size) == (numerics == "reordered")
    recomputes = bool(memory.plan.levers.regions)
    assert recomputes or numerics != "exact"
    module, planned = fitted(
        tmp_path, memory.microbatch_size, module=module, callbacks=[memory], **memory.trainer_arguments
    )
    assert planned.global_step == trainer.global_step == 256 // size
    assert module.was_checkpointed == recomputes and not is_checkpointed(module)
    tolerance = {"exact": 0.0, "reordered": 1e-4, "reduced": 0.05}[numerics]
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_trainer_made_otherwise_is_refused(tmp_path: Path) -> None:
    module = Module()
    memory = MemfitCallback(module, data()[:64], budget="1GiB", numerics="exact", precisions=["32-true"], points=1)
    with pytest.raises(UsageError, match="accumulate_grad_batches=3"):
        fitted(tmp_path, 64, module=module, callbacks=[memory], accumulate_grad_batches=3)
    with pytest.raises(UsageError, match="128 samples at once"):
        fitted(tmp_path, 128, module=module, callbacks=[memory], **memory.trainer_arguments)

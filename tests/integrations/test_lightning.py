"""memfit inside the Trainer of Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from memfit import integrations
from memfit.errors import InfeasibleError, UsageError
from memfit.recomputation import is_checkpointed
from tests.measuring import peak_bytes_of
from tests.recomputation.steps import Chain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    MemfitCallback = integrations.lightning.MemfitCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning's own


class Several(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Has batches of two loaders, validation, and what it is given to optimize with."""

    def __init__(self, configured: Any = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.configured, self.was_checkpointed = configured, False
        self.losses: list[float] = []
        torch.manual_seed(0)
        self.chain = Chain(dim=64, blocks=3)
        for module in self.chain.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pairs = batch.values() if isinstance(batch, dict) else [batch]
        loss = torch.stack([torch.nn.functional.cross_entropy(self.chain(x).float(), y) for x, y in pairs]).sum()
        self.log("loss", loss, on_step=True)
        self.was_checkpointed = is_checkpointed(self)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.chain(x).float(), y)
        self.losses.append(loss.item())
        self.log("validation_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.configured is None else self.configured(self)


SEEDED = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(512, 64, generator=SEEDED), torch.randint(0, 3, (512,), generator=SEEDED))


def first(size: int) -> tuple[torch.Tensor, ...]:
    return tuple(t[:size].clone() for t in DATA.tensors)


def loader_of(size: int) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=size)


def fit(module: Any, train: Any, folder: Path, validation: Any = None, resume: Any = None, **arguments: Any) -> int:
    """Fit a module; return the peak with the module, which was there before."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    arguments = {"max_epochs": 2, "enable_checkpointing": False} | quiet | arguments
    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=folder, **arguments)
    torch.manual_seed(3)
    _, peak = peak_bytes_of(lambda: trainer.fit(module, train, validation, ckpt_path=resume))
    return peak + sum(p.nbytes for p in module.parameters())


def with_schedule(module: Any) -> Any:
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.dim() > 1]},
            {"params": [p for p in module.parameters() if p.dim() < 2]},
        ],
        lr=1e-2,
    )
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


OPTIONS: dict[str, Any] = {"numerics": "exact", "precisions": ["32-true"], "points": 1, "time_limit_seconds": 0.5}


def at_the_lowest(module: Any, batch: Any, **options: Any) -> Any:
    """Return a callback with the lowest budget that a plan fits."""
    with pytest.raises(InfeasibleError) as caught:
        MemfitCallback(module, batch, budget="1B", **(OPTIONS | options))
    return MemfitCallback(module, batch, budget=caught.value.lowest_peak_bytes, **(OPTIONS | options))


@pytest.mark.parametrize(
    ("precision", "numerics", "size"),
    [
        ("32-true", "exact", 64),
        pytest.param("32-true", "reordered", 64, marks=pytest.mark.ci),
        pytest.param("bf16-mixed", "reduced", 8, marks=pytest.mark.ci),
    ],
)
def test_a_trainer_trains_as_before_within_a_budget(tmp_path: Path, precision: str, numerics: str, size: int) -> None:
    plain, module = Several(dropout=0.0), Several(dropout=0.0)
    fit(plain, loader_of(size), tmp_path, max_steps=4)
    records: list[dict[str, Any]] = []
    memory = at_the_lowest(module, first(size), numerics=numerics, precisions=[precision], log=records.append)
    assert numerics == "reduced" or (memory.microbatch_size < size) == (numerics == "reordered")
    recomputes = bool(memory.plan.levers.regions)
    assert recomputes or numerics != "exact"
    arguments = {"max_steps": 4, "callbacks": [memory], **memory.trainer_arguments}
    peak = fit(module, loader_of(memory.microbatch_size), tmp_path, **arguments)
    assert peak <= memory.plan.budget_bytes or numerics == "reduced"
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {record["predicted_peak_bytes"] for record in records} == {memory.plan.predicted.peak_bytes}
    assert module.was_checkpointed == recomputes and not is_checkpointed(module)
    tolerance = {"exact": 0.0, "reordered": 1e-4, "reduced": 0.05}[numerics]
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.ci
@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=pytest.mark.ci) for w in ("sgd", "schedule", "two loaders")] + ["validation", "clipped"],
)
def test_what_else_a_trainer_does_stays_bitwise_and_within_the_budget(tmp_path: Path, way: str) -> None:
    configured = with_schedule if way in ("schedule", "validation") else None
    validation = [loader_of(256), loader_of(64)] if way == "validation" else None
    arguments: dict[str, Any] = {"gradient_clip_val": 0.1} if way == "clipped" else {}
    if way == "validation":
        arguments["val_check_interval"] = 1

    def train() -> Any:
        return {"a": loader_of(256), "b": loader_of(256)} if way == "two loaders" else loader_of(256)

    plain, module = Several(configured), Several(configured)
    fit(plain, train(), tmp_path, validation, **arguments)
    batch = {"a": first(256), "b": first(256)} if way == "two loaders" else first(256)
    memory = at_the_lowest(module, batch)
    assert memory.microbatch_size == 256
    arguments |= {"callbacks": [memory], **memory.trainer_arguments}
    peak = fit(module, train(), tmp_path, validation, **arguments)
    assert module.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert 0.9 * memory.plan.predicted.peak_bytes < peak <= memory.plan.budget_bytes


@pytest.mark.ci
def test_training_resumes_bitwise(tmp_path: Path) -> None:
    plain, module = Several(with_schedule, dropout=0.0), Several(with_schedule, dropout=0.0)
    fit(plain, loader_of(256), tmp_path)
    memory = MemfitCallback(module, first(256), budget="0.8x", **OPTIONS)
    assert memory.plan.levers.regions
    store = lightning.callbacks.ModelCheckpoint(tmp_path / "kept", save_last=True)
    arguments = {"enable_checkpointing": True, **memory.trainer_arguments}
    fit(module, loader_of(256), tmp_path, callbacks=[memory, store], max_epochs=1, **arguments)
    again = Several(with_schedule, dropout=0.0)
    memory = MemfitCallback(again, first(256), budget="0.8x", **OPTIONS)
    last = tmp_path / "kept" / "last.ckpt"
    fit(again, loader_of(256), tmp_path, resume=last, callbacks=[memory], **memory.trainer_arguments)
    assert module.losses + again.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def adam(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), amsgrad=True)


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def paired(module: Any, form: Any) -> Any:
    optimizer = adam(module)
    return form(optimizer, step_lr(optimizer))


FORMS: dict[str, Any] = {
    "an optimizer": adam,
    "a list": lambda m: [adam(m)],
    "a tuple": lambda m: (adam(m),),
    "two lists": lambda m: paired(m, lambda o, s: ([o], [s])),
    "two lists, a dict": lambda m: paired(m, lambda o, s: ([o], [{"scheduler": s, "interval": "step"}])),
    "a list and no schedules": lambda m: ([adam(m)], []),
    "a dict": lambda m: {"optimizer": adam(m)},
    "a dict with a schedule": lambda m: paired(m, lambda o, s: {"optimizer": o, "lr_scheduler": s}),
    "a list of dicts": lambda m: paired(m, lambda o, s: [{"optimizer": o, "lr_scheduler": {"scheduler": s}}]),
}

KINDS = ("an optimizer", "two lists, a dict", "a list of dicts")
"""Forms of each depth; CI runs the others."""


@pytest.mark.parametrize("form", [f if f in KINDS else pytest.param(f, marks=pytest.mark.ci) for f in FORMS])
def test_the_plan_is_for_the_optimizer_that_the_module_configures(tmp_path: Path, form: str) -> None:
    module = Several(FORMS[form])
    memory = MemfitCallback(module, first(8), budget="8GiB", **OPTIONS)
    weights = sum(p.nbytes for p in module.parameters())
    assert 3 * weights <= memory.plan.plain.by_category["optimizer state"] < 3.1 * weights  # amsgrad keeps a third
    fit(module, loader_of(8), tmp_path, callbacks=[memory], max_steps=2, **memory.trainer_arguments)


class ByItself(Several):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def of_the_trainer(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=1 / module.trainer.estimated_stepping_batches)


def test_several_optimizers_and_manual_optimization_are_refused_by_name() -> None:
    several = Several(lambda m: [torch.optim.SGD([p], lr=0.1) for p in list(m.parameters())[:2]])
    with pytest.raises(
        UsageError, match=r"Several.configure_optimizers\(\) returns 2 optimizers \(SGD, SGD\).*memfit run"
    ):
        MemfitCallback(several, first(8), budget="8GiB")
    with pytest.raises(UsageError, match="ByItself.automatic_optimization=False.*memfit run"):
        MemfitCallback(ByItself(), first(8), budget="8GiB")


@pytest.mark.ci
def test_an_optimizer_that_needs_a_trainer_is_given(tmp_path: Path) -> None:
    module = Several(of_the_trainer)
    with pytest.raises(UsageError, match=r"configure_optimizers\(\) failed without a trainer.*optimizer="):
        MemfitCallback(module, first(64), budget="8GiB", **OPTIONS)
    wrong, right = torch.optim.AdamW(module.parameters()), torch.optim.SGD(module.parameters(), lr=0.1)
    memory = MemfitCallback(module, first(64), budget="8GiB", optimizer=wrong, **OPTIONS)
    with pytest.raises(UsageError, match="the trainer has the optimizer SGD .* made for AdamW"):
        fit(module, loader_of(64), tmp_path, callbacks=[memory], max_steps=1, **memory.trainer_arguments)
    memory = MemfitCallback(module, first(64), budget="8GiB", optimizer=right, **OPTIONS)
    fit(module, loader_of(64), tmp_path, callbacks=[memory], max_steps=1, **memory.trainer_arguments)


@pytest.mark.ci
def test_a_validation_beyond_the_budget_is_refused_before_training(tmp_path: Path) -> None:
    module = Several()
    memory = MemfitCallback(module, first(8), budget="8GiB", **OPTIONS)
    arguments = {"callbacks": [memory], **memory.trainer_arguments, "num_sanity_val_steps": 0}
    with pytest.raises(UsageError, match=r"gives batches of 512 samples.*validation_batch="):
        fit(module, loader_of(8), tmp_path, loader_of(512), **arguments)
    assert module.losses == []
    lowest = at_the_lowest(module, first(8)).plan.budget_bytes
    with pytest.raises(UsageError, match=r"validation_batch= of 512 samples: an evaluation needs"):
        MemfitCallback(module, first(8), budget=lowest, validation_batch=first(512), **OPTIONS)
    memory = MemfitCallback(module, first(8), budget="8GiB", validation_batch=first(512), **OPTIONS)
    arguments = {"callbacks": [memory], **memory.trainer_arguments}
    fit(module, loader_of(8), tmp_path, loader_of(512), max_steps=1, **arguments)


def test_a_trainer_made_otherwise_is_refused(tmp_path: Path) -> None:
    module = Several()
    memory = MemfitCallback(module, first(64), budget="1GiB", **OPTIONS)
    with pytest.raises(UsageError, match="accumulate_grad_batches=3"):
        fit(module, loader_of(64), tmp_path, callbacks=[memory], accumulate_grad_batches=3)
    with pytest.raises(UsageError, match="batches of 128 samples"):
        fit(module, loader_of(128), tmp_path, callbacks=[memory], **memory.trainer_arguments)
    other = lightning.callbacks.GradientAccumulationScheduler({1: 2})
    with pytest.raises(UsageError, match="GradientAccumulationScheduler"):
        fit(module, loader_of(64), tmp_path, callbacks=[memory, other], **memory.trainer_arguments)

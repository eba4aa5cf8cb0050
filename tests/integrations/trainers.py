"""Trainings of two ranks under other libraries' trainers: plain ones, and ones with memfit."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.distributed.accelerate_on_cpus import fully_sharded_on_cpus
from memfit import integrations, ir
from memfit._torch import local_part
from memfit.errors import MemfitError
from memfit.hardware import allocated
from memfit.ir import Plan, Sharding
from memfit.ranks.engines import send_in_place
from memfit.recomputation import is_checkpointed
from memfit.workload import Workload
from tests import warm
from tests.fixed_costs import fixed_costs
from tests.quick_plans import quick_plans

DIM, SAMPLES, STEPS, TOKENS = 64, 8, 4, 64
BATCH_BYTES = SAMPLES * TOKENS * (4 * DIM + 8)
UNITS = ("blocks.0", "blocks.1", "blocks.2")


class Block(nn.Module):
    """A block whose activations are much larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)))
        return x + y


class Net(nn.Module):
    """Three blocks and a head, which returns its loss as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Rows(Dataset[Any]):
    """Sequences of random vectors with labels."""

    def __len__(self) -> int:
        return 2 * SAMPLES * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(0, 3, (TOKENS,), generator=generator)
        return {"x": torch.randn(TOKENS, DIM, generator=generator), "labels": labels}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    return loss


class Peaks:
    """Measures the peak of each step, with what a rank holds then: of batches, what was loaded before the step."""

    def __init__(self, model: nn.Module, batch_bytes: int = BATCH_BYTES) -> None:
        self._model, self._batch_bytes = model, batch_bytes
        self.peaks: list[int] = []
        self.was_checkpointed = False
        self._open = contextlib.ExitStack()

    def begin(self) -> None:
        gc.collect()
        self._meter = self._open.enter_context(allocated())

    def end(self, optimizer: Any) -> None:
        self.was_checkpointed = is_checkpointed(self._model)
        self._open.close()
        state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
        held = [local_part(t) for t in (*self._model.parameters(), *self._model.buffers(), *state)]
        of_ddp = sum(p.nbytes for p in self._model.parameters()) if self.is_data_parallel else 0
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        self.peaks.append(self._meter.peak_bytes + sum(storages.values()) + of_ddp + self._batch_bytes)

    @property
    def is_data_parallel(self) -> bool:
        return not isinstance(self._model, FSDPModule) and not any(
            isinstance(module, FSDPModule) for module in self._model.modules()
        )


def plugin(**changes: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    given = {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "cpu_ram_efficient_loading": False,
    }
    return FullyShardedDataParallelPlugin(**(given | changes))


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    with warnings.catch_warnings(), fixed_costs(), quick_plans():
        warnings.simplefilter("ignore")
        yield


Found = dict[str, Any]


def found(losses: list[float], model: nn.Module, peaks: Peaks, plan: Plan | None) -> Found:
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {
        "losses": losses,
        "weights": torch.cat([w.detach().flatten() for w in weights]),
        "peak_bytes": min(peaks.peaks[1:]),
        "plan": None if plan is None else ir.codec.encode(plan),
        "was_checkpointed": peaks.was_checkpointed,
    }


def under_accelerate(budget: Any, fully: bool, plan: Any = None, **options: Any) -> Found:
    """Train in a loop of accelerate; without a budget and a plan, without memfit."""
    from accelerate import Accelerator

    model, data = net(), Rows()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arguments: Any = {"cpu": True} | ({"fsdp_plugin": plugin(**options.pop("plugin", {}))} if fully else {})
    size, fitted = SAMPLES, None
    if budget is None and plan is None:
        accelerator = Accelerator(**arguments)
    else:
        batch = next(iter(DataLoader(data, SAMPLES)))
        mine = Workload(model, batch, loss_fn, optimizer, name="net")
        fitted = integrations.accelerate.FittedLoop(mine, budget=budget, plan=plan, arguments=arguments, **options)
        accelerator, size = fitted.accelerator(), fitted.microbatch_size
    loader: Any = DataLoader(data, SAMPLES, sampler=DistributedSampler(data, shuffle=False))
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    send_in_place(wrapped)
    losses, peaks = [], Peaks(model)
    for batch in loader:
        peaks.begin()
        loss_sum = 0.0
        for first in range(0, SAMPLES, size):
            part = {name: tensor[first : first + size] for name, tensor in batch.items()}
            with accelerator.accumulate(wrapped):
                loss = loss_fn(wrapped, part)
                accelerator.backward(loss)
                loss_sum += float(loss.detach()) * size / SAMPLES
                optimizer.step()
                optimizer.zero_grad()
            del loss
        peaks.end(optimizer)
        losses.append(loss_sum)
    result = found(losses, model, peaks, fitted and fitted.plan)
    if fitted is not None:
        fitted.close()
    return result


def under_transformers(budget: Any, fully: bool, plan: Any = None, **options: Any) -> Found:
    """Train by the Trainer of transformers; without a budget and a plan, without memfit."""
    import transformers

    sharded: Any = {}
    if fully:
        config = {
            "version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["Block"],
            "cpu_ram_efficient_loading": False,
        } | options.pop("config", {})
        sharded = {"fsdp": True, "fsdp_config": config}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=SAMPLES,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_grad_norm=0.0,
            **(sharded | options.pop("arguments", {})),
        )
        model = net()
        trainer: Any = transformers.Trainer(model, arguments, train_dataset=Rows())
        callback = None
        if budget is not None or plan is not None:
            callback = integrations.transformers.MemfitCallback(trainer, budget=budget, plan=plan, **options)
            trainer.add_callback(callback)
        peaks = Peaks(model)

        class Measuring(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                send_in_place(trainer.model)

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                peaks.begin()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                peaks.end(trainer.optimizer)

        trainer.add_callback(Measuring())
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return found(losses, model, peaks, callback and callback.plan)


def under_lightning(budget: Any, fully: bool, plan: Any = None, **options: Any) -> Found:
    """Train by the Trainer of Lightning; without a budget and a plan, without memfit."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if fully and not isinstance(self, FSDPModule) and self._trainer is not None:
                mesh = self.device_mesh["data_parallel"]
                for block in self.net.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.net, mesh=mesh)
                send_in_place(self.net)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_fn(self.net, batch)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    size, callbacks, arguments = SAMPLES, [], {}
    if budget is not None or plan is not None:
        units = ("net", *(f"net.{unit}" for unit in UNITS))
        engine = Sharding(world_size=2, mode="zero3", units=units, kept=("net",)) if fully else None
        batch = next(iter(DataLoader(Rows(), SAMPLES)))
        options = {"engine": engine, "budget": budget, "plan": plan} | options
        callback = integrations.lightning.MemfitCallback(module, batch, **options)
        size, callbacks, arguments = callback.microbatch_size, [callback], callback.trainer_arguments
    steps = SAMPLES // size
    peaks = Peaks(module, BATCH_BYTES // steps)  # the microbatches after the first are loaded, and metered, in the step

    class Measuring(lightning.pytorch.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % steps == 0:
                peaks.begin()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % steps == steps - 1:
                peaks.end(trainer.optimizers[0])

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if fully else DDPStrategy()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Measuring()],
        **arguments,
    )
    data = torch.utils.data.Subset(Rows(), range(int(os.environ["RANK"]), len(Rows()), 2))
    trainer.fit(module, DataLoader(data, size))
    per_step = torch.tensor(module.losses).view(-1, steps).mean(1).tolist()
    return found(per_step, module, peaks, callbacks[0].plan if callbacks else None)


UNDER = {"accelerate": under_accelerate, "transformers": under_transformers, "lightning": under_lightning}


def on_two_ranks(name: str, fully: bool, runs: list[dict[str, Any]]) -> list[list[Found | str]]:
    """Start two ranks by torchrun, as forks of the warm server; return what each rank's runs gave, by run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "runs").write_bytes(pickle.dumps((name, fully, runs)))
        line = [
            *warm.command("-m", "torch.distributed.run"),
            *("--nproc-per-node", "2", "--no-python"),
            *warm.command("-m", "tests.integrations.trainers", folder),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line,
            cwd=warm.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        by_rank = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(2)]
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def _each(name: str, fully: bool, runs: list[dict[str, Any]]) -> Iterator[Found | str]:
    """Yield what some trainings give, one after the other; the message of an error where one fails."""
    made: Any = None
    with quickly(), fully_sharded_on_cpus():
        for run in runs:
            given = {"budget": None, "plan": made if run.pop("again", False) else None, **run}
            try:
                result = UNDER[name](given.pop("budget"), fully, **given)
                made = made or (result["plan"] and ir.codec.decode(result["plan"], Plan, source="a run's plan"))
                yield result
            except MemfitError as e:
                yield f"{type(e).__name__}: {e}"
            finally:
                _forget()


def _forget() -> None:
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = list(_each(*pickle.loads((folder / "runs").read_bytes())))
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # or threads of gloo that outlive the group abort a process that ends by itself

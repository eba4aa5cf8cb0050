"""Engines of other libraries by which ranks share a step, as memfit counts them."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from memfit.errors import UsageError
from memfit.integrations.internals import fully_sharded_modules
from memfit.integrations.trainer_plan import data_parallel
from memfit.ir.sharding import Reduces, Sharding
from memfit.ranks.environment import check_shared

OWN_CHECKPOINTING = "the engine's own checkpointing (FullyShardedDataParallelPlugin.activation_checkpointing)"


def engine_of(accelerator: Any, model: nn.Module, arguments: dict[str, Any] | None = None) -> Sharding | None:
    """Return how an `Accelerator` has ranks share the step of a model that it has not prepared; None for one process.

    Args:
        arguments: Those of DistributedDataParallel; None for the accelerator's.

    Raises:
        UsageError: By an engine that memfit can't count, or not among all processes of a launcher.
    """
    check_shared(
        accelerator.num_processes,
        "accelerate's step",
        "on CPUs give FittedLoop(arguments={'cpu': True}) or TrainingArguments(use_cpu=True) to share the step, or"
        " start one process, without torchrun",
    )
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return None
    _check_parallelism(getattr(accelerator, "parallelism_config", None))
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    reduces: Reduces = "each" if each else "last"
    if kind == DistributedType.FSDP:
        return _fully_sharded(accelerator, model, reduces)
    if not kind.value.startswith("MULTI_"):
        raise UsageError(
            f"accelerate runs the step by {kind.value}, which memfit does not predict: use"
            " DistributedDataParallel or FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if arguments is None:
        arguments = {} if accelerator.ddp_handler is None else accelerator.ddp_handler.to_kwargs()
    return data_parallel(accelerator.num_processes, arguments, reduces=reduces)


def _check_parallelism(config: Any) -> None:
    names = ("tp_size", "cp_size", "sp_size", "dp_replicate_size")
    for name in names:
        if (size := getattr(config, name, 1) or 1) > 1:
            raise UsageError(
                f"ParallelismConfig.{name}={size}: memfit predicts plain data parallelism and FSDP2 over all"
                f" processes. Give {name}=1; memfit.estimate(parallel=...) predicts tensor, context and"
                " pipeline parallelism"
            )


def _fully_sharded(accelerator: Any, model: nn.Module, reduces: Reduces) -> Sharding:
    plugin, where = accelerator.state.fsdp_plugin, "FullyShardedDataParallelPlugin"
    if plugin.fsdp_version != 2:
        raise UsageError(
            f"{where}.fsdp_version={plugin.fsdp_version}: memfit predicts FSDP2 (fully_shard). Give fsdp_version=2"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UsageError(f"{where}.cpu_offload: memfit does not predict shards in the host's memory. Give False")
    if plugin.ignored_modules is not None:
        raise UsageError(f"{where}.ignored_modules: memfit predicts every parameter as sharded. Give None")
    if accelerator.mixed_precision != "no" or getattr(plugin.mixed_precision_policy, "param_dtype", None) is not None:
        raise UsageError(
            f"mixed_precision={accelerator.mixed_precision!r} under {where}: memfit does not predict the casts of"
            " FSDP2. Give mixed_precision='no' (TrainingArguments: leave bf16 and fp16 out), use"
            " DistributedDataParallel, or memfit.train with a plan of world_size="
        )
    units, kept = fully_sharded_modules(plugin, model)
    return Sharding(
        world_size=accelerator.num_processes,
        mode="zero3" if plugin.reshard_after_forward else "zero2",
        units=tuple(units),
        kept=tuple(kept) if plugin.reshard_after_forward else (),
        reduces=reduces,
    )


def own_checkpointing(accelerator: Any) -> Any:
    """Return an accelerator's FSDP plugin if it checkpoints the modules that it shards; None where it does not.

    With the plan's regions, modules would be recomputed twice.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if getattr(plugin, "activation_checkpointing", False) else None

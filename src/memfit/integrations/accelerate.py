"""memfit under a loop with Hugging Face's `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from memfit.errors import UsageError, brought_by
from memfit.integrations.trainer_plan import NAMES, TrainerPlan, check_budget, data_parallel
from memfit.ir import Plan, Reduces, Sharding
from memfit.ranks import Group, SingleProcess, check_shared, launched_size
from memfit.workload import Workload

with brought_by("accelerate", "memfit.integrations.accelerate"):
    import accelerate as _accelerate
    from accelerate.utils import DistributedType

    from memfit.integrations import internals

OWN_CHECKPOINTING = "the engine's own checkpointing (FullyShardedDataParallelPlugin.activation_checkpointing)"


class FittedLoop(TrainerPlan):
    """A plan for a loop with an `Accelerator`; it checkpoints the model until `close`.

    Args:
        workload: The step at the global batch, over the model and the optimizer that the loop trains, before
            `prepare`. With several processes: at the batch of one of them, on each.
        budget: The memory budget, as for `memfit.plan`; of one process where there are several.
        plan: A plan that was made for such a loop, or its file, instead of a budget.
        arguments: Arguments of the `Accelerator`, such as `fsdp_plugin` and `kwargs_handlers`: the plan is made for
            the engine that they lead to, among the processes that were started.
        options: Further options of `memfit.plan`.

    Attributes:
        microbatch_size: Batch size for the loop's `DataLoader`.

    Raises:
        UsageError: The engine is one that memfit can't count.
        InfeasibleError: No plan fits the budget.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        budget: int | float | str | None = None,
        plan: Plan | Path | str | None = None,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_budget(budget, plan)
        self._arguments, self._model = dict(arguments or {}), workload.model
        engine, ranks, off = None, SingleProcess(), []
        if launched_size() > 1:
            first = _accelerate.Accelerator(**self._arguments)
            kind, is_alone = first.device.type, first.num_processes == 1
            try:
                engine, plugin = engine_of(first, workload.model), own_checkpointing(first)
            finally:
                internals.forget_accelerator_state(is_alone=is_alone)
            ranks = Group(kind)
            if plugin is not None:
                plugin.activation_checkpointing = False
                off.append(f"{OWN_CHECKPOINTING} is turned off: the plan's recomputation replaces it")
        super().__init__(workload, engine=engine, ranks=ranks, given=plan, budget=budget, **options)
        self.plan = replace(self.plan, notes=[*self.plan.notes, *off])
        self.checkpoint(workload.model)

    def accelerator(self, **arguments: Any) -> _accelerate.Accelerator:
        """Return an accelerator with the plan's precision and accumulation, and further `arguments`; then `prepare`.

        Raises:
            UsageError: It shares the step in another way than the plan was made for.
        """
        made = _accelerate.Accelerator(
            mixed_precision=NAMES[self.precision],
            gradient_accumulation_steps=self.accumulation,
            **self._arguments,
            **arguments,
        )
        if launched_size() > 1 and (found := engine_of(made, self._model)) != self.plan.engine:
            raise UsageError(
                f"accelerator({', '.join(arguments)}) shares the step by {found}, and the plan by"
                f" {self.plan.engine}: give these arguments as FittedLoop(arguments=...)"
            )
        return made


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
    config = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size", "dp_replicate_size"):
        if (size := getattr(config, name, 1) or 1) > 1:
            raise UsageError(
                f"ParallelismConfig.{name}={size}: memfit predicts plain data parallelism and FSDP2 over all"
                f" processes. Give {name}=1; memfit.estimate(parallel=...) predicts tensor, context and"
                " pipeline parallelism"
            )
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
    units, kept = internals.fully_sharded_modules(plugin, model)
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

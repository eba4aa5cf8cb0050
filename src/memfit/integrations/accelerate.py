"""memfit under a loop with Hugging Face's `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memfit.errors import UsageError, brought_by
from memfit.integrations.trainer_plan import MIXED, NAMES, TrainerPlan, check_budget
from memfit.ir.plan import Plan
from memfit.pipeline.verbs import plan_given
from memfit.ranks.environment import launched_size
from memfit.ranks.group import Group
from memfit.ranks.one_process import SingleProcess
from memfit.workload import Workload

with brought_by("accelerate", "memfit.integrations.accelerate"):
    import accelerate as _accelerate

    from memfit.integrations.engines import OWN_CHECKPOINTING, engine_of, own_checkpointing
    from memfit.integrations.internals import forget_accelerator_state


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
                forget_accelerator_state(is_alone=is_alone)
            ranks = Group(kind)
            if plugin is not None:
                plugin.activation_checkpointing = False
                off.append(f"{OWN_CHECKPOINTING} is turned off: the plan's recomputation replaces it")
        precisions = ["32-true"] if engine is not None and engine.is_fully_sharded else list(MIXED[:2])
        super().__init__(
            workload,
            engine=engine,
            ranks=ranks,
            given=plan_given(plan),
            budget=budget,
            **({"precisions": precisions} | options),
        )
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

"""memfit under a loop with Hugging Face's `Accelerator`."""

from __future__ import annotations

from typing import Any

from memfit.errors import MissingExtraError
from memfit.integrations.fitted import MIXED, NAMES, Fitted
from memfit.workload import Workload

try:
    import accelerate as _accelerate
except ImportError as e:
    raise MissingExtraError("memfit.integrations.accelerate", "accelerate", e.name or "accelerate") from e


class FittedLoop(Fitted):
    """A plan for a loop with an `Accelerator`; it checkpoints the model until `close`.

    Args:
        workload: The step at the global batch, over the model and the optimizer that the loop trains.
        budget: The memory budget, as for `memfit.plan`.
        options: Further options of `memfit.plan`.

    Attributes:
        microbatch_size: Batch size for the loop's `DataLoader`.
    """

    def __init__(self, workload: Workload, *, budget: int | float | str, **options: Any) -> None:
        super().__init__(workload, budget=budget, **({"precisions": list(MIXED[:2])} | options))
        self.checkpoint(workload.model)

    def accelerator(self, **arguments: Any) -> _accelerate.Accelerator:
        """Return an accelerator with the plan's precision and accumulation, and further `arguments`."""
        return _accelerate.Accelerator(
            mixed_precision=NAMES[self.precision], gradient_accumulation_steps=self.accumulation, **arguments
        )

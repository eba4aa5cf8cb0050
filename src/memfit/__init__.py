"""memfit makes a PyTorch training step fit the memory you have, at the smallest slow-down that can be found.

plan = memfit.plan(workload, budget="1.5GiB")
print(plan)
step = memfit.apply(plan, workload)
result = step(batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit import tools
    from memfit.errors import (
        BudgetError,
        CaptureError,
        InfeasibleError,
        MemfitError,
        MemoryLimitError,
        OutOfMemoryError,
        PlanMismatchError,
        UsageError,
    )
    from memfit.ir.plan import Plan
    from memfit.pipeline import (
        Verification,
        apply,
        devices,
        estimate,
        fit,
        fleet,
        load_workload,
        plan,
        train,
        verify,
        write_report,
    )
    from memfit.training.optimizers import Optimizers
    from memfit.training.step import Step, StepResult
    from memfit.version import __version__
    from memfit.workload import Loop, LossScaling, Workload

__all__ = [
    "BudgetError",
    "CaptureError",
    "InfeasibleError",
    "Loop",
    "LossScaling",
    "MemfitError",
    "MemoryLimitError",
    "Optimizers",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Step",
    "StepResult",
    "UsageError",
    "Verification",
    "Workload",
    "__version__",
    "apply",
    "devices",
    "estimate",
    "fit",
    "fleet",
    "load_workload",
    "plan",
    "tools",
    "train",
    "verify",
    "write_report",
]

_HOMES = (
    "memfit.pipeline",
    "memfit.errors",
    "memfit.ir.plan",
    "memfit.training.optimizers",
    "memfit.training.step",
    "memfit.version",
    "memfit.workload",
)
"""The modules that have the public names, as imported above."""

if not TYPE_CHECKING:  # of a module with this function, type checkers would take any name

    def __getattr__(name: str) -> Any:
        """Import PyTorch and its users when a public name is first used: help and shell completion do without."""
        if name == "tools":
            return importlib.import_module("memfit.tools")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        homes = [vars(importlib.import_module(home)) for home in _HOMES]
        globals().update(
            {public: next(home[public] for home in homes if public in home) for public in __all__ if public != "tools"}
        )
        return globals()[name]


def __dir__() -> list[str]:
    """Return the names of the module, the public ones included that were not used yet."""
    return sorted({*globals(), *__all__})

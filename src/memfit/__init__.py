"""memfit makes a PyTorch training step fit the memory you have, at the smallest slow-down that can be found.

plan = memfit.plan(workload, budget="1.5GiB")
print(plan)
step = memfit.apply(plan, workload)
result = step(batch)
"""

from memfit.apply.batch_norm import freeze_batch_norm, group_norm_for_batch_norm
from memfit.climbing import ladder
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
    adapt,
    apply,
    compare,
    compile_backend,
    devices,
    estimate,
    fit,
    load_plan,
    load_workload,
    look_up,
    plan,
    probe_range,
    save_plan,
    train,
    verify,
    write_report,
)
from memfit.train.ledger import memory_summary
from memfit.train.optimizers import Optimizers
from memfit.train.step import Step, StepResult
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
    "adapt",
    "apply",
    "compare",
    "compile_backend",
    "devices",
    "estimate",
    "fit",
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "load_plan",
    "load_workload",
    "look_up",
    "memory_summary",
    "plan",
    "probe_range",
    "save_plan",
    "train",
    "verify",
    "write_report",
]

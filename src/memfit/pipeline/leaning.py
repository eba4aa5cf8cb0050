"""When lean normalisations and activations are worth trying, as a trace of the step tells."""

from __future__ import annotations

from memfit.apply.lean import is_lean
from memfit.capture.step import is_compiled
from memfit.ir.trace import Trace
from memfit.workload import Workload

LEAST_SHARE = 0.05
"""Of the plain peak: what lean modules must keep before a step with them lean is captured, and then must save."""


def worthwhile(workload: Workload, trace: Trace, peak_bytes: int) -> bool:
    """Tell whether what a step's normalisations, activations and dropouts make takes enough until its backward pass.

    Args:
        workload: The workload.
        trace: Its plain step.
        peak_bytes: The peak of that.
    """
    names = {fqn for fqn, module in workload.model.named_modules() if is_lean(module)}
    kept = sum(
        storage.nbytes
        for storage in trace.storages
        if storage.category == "activations"
        and trace.ops[storage.birth].phase == "forward"
        and trace.fqn_of(trace.ops[storage.birth].call) in names
    )
    return kept >= LEAST_SHARE * peak_bytes and not is_compiled(workload)

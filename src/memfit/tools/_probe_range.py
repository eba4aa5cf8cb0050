"""Would a step's numbers fit fp16? One forward and backward pass over real batches, watched."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from memfit.capture.fake_workload import nothing_changes, real_copy
from memfit.capture.range_observer import RangeObserver
from memfit.errors import UsageError
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers
from memfit.ir.ranges import RangeReport, range_report
from memfit.levers.stack import applied, check_workload
from memfit.pipeline._verify import first_batches
from memfit.pipeline.placement import device_kind
from memfit.pipeline.verbs import checked
from memfit.units import Progress, silent
from memfit.workload import Loss, Workload, samples_of


@checked
def probe_range(
    workload: Workload, *, batches: int = 1, microbatch_size: int | None = None, progress: Progress = silent
) -> RangeReport:
    """Find the modules with activations or gradients outside fp16's range or flushed to zero, and give advice.

    Runs forward and backward passes in bf16-mixed, on a copy of the workload as it is: probe again after some
    training, since ranges move.

    Args:
        workload: With data; nothing of it is changed. `fp32_modules` are left out, so that a recommendation can be
            tried out by probing again with it.
        batches: How many of the workload's first batches to run (> 0).
        microbatch_size: Samples in one forward and backward pass (> 0); None for the whole batch.
        progress: Told how many batches are done, of how many.

    Raises:
        UsageError: `batches` is not above 0, or a plan is applied to the workload.
    """
    if batches < 1:
        raise UsageError(f"batches={batches} is not above 0: give the number of batches to check")
    kind = device_kind(workload.model)
    check_workload(workload, find_device(kind))
    levers = Levers(precision="bf16-mixed", microbatch_size=microbatch_size or samples_of(workload))
    copied = real_copy(workload)
    ranges = RangeObserver(copied.model)

    def loss_fn(model: nn.Module, batch: Any) -> Loss:
        loss = workload.loss_fn(model, batch)
        ranges.follow("", loss)
        return loss

    copied = dataclasses.replace(copied, loss_fn=loss_fn)
    with nothing_changes(workload) as around, applied(levers, copied) as step:
        progress = around.outside(progress)
        progress("probe", 0, batches)
        for index, batch in enumerate(first_batches(workload, batches)):
            with ranges:
                step.gradients(batch)
            progress("probe", index + 1, batches)
    return range_report(*ranges.seen())

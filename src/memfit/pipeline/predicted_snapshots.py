"""What a step is predicted to allocate and free, as a memory snapshot, while the step is in use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from memfit.cost.calibrate import known_workspace_bytes
from memfit.hardware.host import find_device
from memfit.ir.allocations import allocations
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.plan import Plan
from memfit.levers.switch import Switch
from memfit.planner.captures import capture_levers
from memfit.report.memory_snapshot import write_snapshot


def write_predicted_snapshot(switch: Switch, plan: Plan, batch: Any, path: Path) -> Path:
    """Write the history of two steps on a batch under a plan, as the simulated allocator has it.

    Nothing is measured: an operator's workspace counts where it is known already, and each event takes a microsecond.

    Raises:
        CaptureError: The step can't be captured.
        OutputError: The file can't be written.
    """
    workload, device = dataclasses.replace(switch.step.workload, batch=batch), find_device(plan.device)
    with switch.lifted():
        trace = capture_levers(workload, replace(plan.levers, regions=()), device)
    known = known_workspace_bytes()
    costs = CostTable(
        device=device.name,
        torch_version=str(torch.__version__),
        threads=torch.get_num_threads(),
        ops={text: OpCost(0.0, known.get(text, 0), False) for text in trace.signatures},
        dispatch_seconds=0.0,
        checkpoint_seconds=0.0,
        selective_op_seconds=0.0,
        peak_error=0.0,
    )
    return write_snapshot(allocations(trace, costs, plan.levers.regions), device.allocator, path)

"""The proof of a plan: what it recomputes, held bit by bit against the user's own step, where that can run here."""

from __future__ import annotations

import torch

from memfit.capture.fake_workload import nothing_changes
from memfit.hardware.host import free_bytes
from memfit.ir.device import Device
from memfit.ir.plan import Levers, Prediction
from memfit.ir.remat import Region
from memfit.levers.stack import applied_to_copy
from memfit.recomputation.probe import Differences, probing
from memfit.tape import LoopWorkload
from memfit.units import format_bytes, format_seconds
from memfit.workload import Workload, has_data

LONGEST_SECONDS = 30.0
"""A step that is predicted to take longer is not run to prove a plan."""
_ROOM = 2.0  # the free memory that a proof asks for, as a multiple of the plain peak: it holds that and a copy


def why_not_here(workload: Workload, device: Device, plain: Prediction, step_seconds: float) -> str:
    """Return why a plan is not proven before it is returned; "" where it can be."""
    free = free_bytes()
    if isinstance(workload, LoopWorkload):
        return "the loop itself runs it"
    if device.is_here and device.kind != "cpu":
        return f"it runs on {device.name}"
    if device.kind != "cpu":
        return f"planned for {device.name}, and this machine's CPU computes differently"
    if not has_data(workload):
        return "the model or the batch has no data here"
    if step_seconds > LONGEST_SECONDS:
        return f"a step is predicted to take {format_seconds(step_seconds)}"
    if _ROOM * plain.peak_bytes > free:
        return f"the plain step needs {format_bytes(plain.peak_bytes)}, and {format_bytes(free)} is free here"
    return ""


def differences(workload: Workload, levers: Levers, place: torch.device | None = None) -> Differences:
    """Return what makes something else when it is recomputed than the forward pass did, by its modules.

    Runs one forward and backward pass with data, on a copy of the workload, and compares every tensor that is
    recomputed with the one that autograd saved, bit by bit. The copy is on the device `place`; None for the
    workload's own.
    """
    with nothing_changes(workload), applied_to_copy(levers, workload, place) as step, probing() as found:
        step.gradients(step.workload.batch)
    return found


def probe_regions(workload: Workload, levers: Levers, place: torch.device | None = None) -> dict[Region, str]:
    """Return the regions whose recomputation makes something else than the forward pass did, and what differs."""
    named = {region.modules: region for region in levers.regions}
    return {
        named.get(modules, Region(modules)): f"the second run of {error.module} differs from the first ({error.how})"
        for modules, error in differences(workload, levers, place).items()
    }

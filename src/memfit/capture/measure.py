"""The measured peak of a step."""

from __future__ import annotations

import weakref

import torch

from memfit.capture.outside import held_besides
from memfit.devices.allocation import allocated
from memfit.sparse import parts
from memfit.workload import StepProgram, tensors_of


def resident_bytes(step: StepProgram) -> int:
    """Return the bytes that stay between steps: parameters, buffers, optimizer state, and the workload's batch."""
    return sum(_resident(step).values())


def _resident(step: StepProgram) -> dict[int, int]:
    """Return the bytes of the storages that stay between steps, by their identity."""
    workload = step.workload
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    tensors += [p for group in workload.optimizer.param_groups for p in group["params"]]
    for values in workload.optimizer.state.values():
        tensors += tensors_of(values)
    tensors += [t.grad for t in tensors_of(workload.batch) if t.is_leaf and t.grad is not None]
    held = [part.untyped_storage() for tensor in tensors for part in parts(tensor)]
    return {storage._cdata: storage.nbytes() for storage in held}


def _besides(step: StepProgram) -> list[weakref.ref[torch.UntypedStorage]]:
    """Return the storages of the tensors outside the model, such as a teacher's, and of their gradients."""
    tensors = held_besides(step.workload)
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [weakref.ref(part.untyped_storage()) for tensor in tensors for part in parts(tensor)]


def measure_peak_bytes(step: StepProgram, batch: object) -> int:
    """Run one step that is not the first, and return its peak of allocated bytes.

    What stays between steps is counted as its storages; the rest as the allocator reports it.
    """
    resident, besides = _resident(step), _besides(step)
    with allocated() as meter:
        step(batch)
    for storage in (found() for found in besides):
        if storage is not None:  # what the step replaced is no more
            resident[storage._cdata] = storage.nbytes()
    return sum(resident.values()) + meter.peak_bytes

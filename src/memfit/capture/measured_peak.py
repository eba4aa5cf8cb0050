"""Measured peaks of steps."""

from __future__ import annotations

import weakref

import torch

from memfit._torch.tensors import storage_key
from memfit.capture.external_state import external_tensors
from memfit.hardware.cpu_allocations import allocated
from memfit.sparse import parts
from memfit.workload import StepProgram, tensors_of


def resident_bytes(step: StepProgram) -> dict[int, int]:
    """Return the bytes held between steps, by storage: parameters, buffers, optimizer state, the workload's batch."""
    workload = step.workload
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    tensors += [p for group in workload.optimizer.param_groups for p in group["params"]]
    for values in workload.optimizer.state.values():
        tensors += tensors_of(values)
    tensors += [t.grad for t in tensors_of(workload.batch) if t.is_leaf and t.grad is not None]
    storages = [part.untyped_storage() for tensor in tensors for part in parts(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages}


def _external_storages(step: StepProgram) -> list[weakref.ref[torch.UntypedStorage]]:
    """Return the storages of the tensors outside the model, such as a teacher's, and of their gradients."""
    tensors = external_tensors(step.workload)
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [weakref.ref(part.untyped_storage()) for tensor in tensors for part in parts(tensor)]


def measure_peak_bytes(step: StepProgram, batch: object) -> int:
    """Run one step that is not the first, and return its peak of allocated bytes.

    Tensors held between steps count by their storages, all others by the allocator's events.
    """
    resident, external = resident_bytes(step), _external_storages(step)
    with allocated() as meter:
        step(batch)
    for storage in (reference() for reference in external):
        if storage is not None:  # the step did not replace it
            resident[storage_key(storage)] = storage.nbytes()
    return sum(resident.values()) + meter.peak_bytes

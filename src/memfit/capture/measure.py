"""The measured peak of a step."""

from __future__ import annotations

from memfit.capture.outside import held_besides
from memfit.devices.allocation import allocated
from memfit.sparse import parts
from memfit.workload import StepProgram, tensors_of


def resident_bytes(step: StepProgram) -> int:
    """Return the bytes that stay between steps: parameters, buffers, optimizer state, and the workload's batch.

    With what the loss function and the modules hold besides, such as a teacher.
    """
    workload = step.workload
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    besides = held_besides(workload)
    tensors += [p for group in workload.optimizer.param_groups for p in group["params"]]
    for values in workload.optimizer.state.values():
        tensors += tensors_of(values)
    kept = [t.grad for t in (*tensors_of(workload.batch), *besides) if t.is_leaf]  # which nothing zeroes
    tensors += [*besides, *(gradient for gradient in kept if gradient is not None)]
    held = [part.untyped_storage() for tensor in tensors for part in parts(tensor)]
    storages = {storage._cdata: storage.nbytes() for storage in held}
    return sum(storages.values())


def measure_peak_bytes(step: StepProgram, batch: object) -> int:
    """Run one step that is not the first, and return its peak of allocated bytes.

    What stays between steps is counted as its storages; the rest as the allocator reports it.
    """
    resident = resident_bytes(step)
    with allocated() as meter:
        step(batch)
    return resident + meter.peak_bytes

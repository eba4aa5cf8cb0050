"""Measured peaks of steps."""

from __future__ import annotations

import gc
import weakref

import torch

from memfit import hardware
from memfit._torch import storage_key
from memfit.capture.external_state import external_tensors
from memfit.errors import UsageError
from memfit.hardware import allocated
from memfit.workload import StepProgram, parts, tensors_of

_BLOCK_BYTES = 512  # to which accelerators' allocators round


def resident_bytes(step: StepProgram, kind: str | None = None) -> dict[int, int]:
    """Return the bytes held between steps, by storage: parameters, buffers, optimizer state, the workload's batch.

    Where a kind of device is named, only those there: step counters of optimizers are on the CPU.
    """
    workload = step.workload
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(workload.batch)]
    tensors += [p for group in workload.optimizer.param_groups for p in group["params"]]
    for values in workload.optimizer.state.values():
        tensors += tensors_of(values)
    tensors += [t.grad for t in tensors_of(workload.batch) if t.is_leaf and t.grad is not None]
    storages = [part.untyped_storage() for tensor in tensors for part in parts(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages if kind in (None, storage.device.type)}


def _external_storages(step: StepProgram) -> list[weakref.ref[torch.UntypedStorage]]:
    """Return the storages of the tensors outside the model, such as a teacher's, and of their gradients."""
    tensors = external_tensors(step.workload)
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [weakref.ref(part.untyped_storage()) for tensor in tensors for part in parts(tensor)]


def _place_of(step: StepProgram) -> torch.device:
    """Return the device of a step's parameters."""
    return next((p.device for p in step.workload.model.parameters()), torch.device("cpu"))


def measure_peaks(step: StepProgram, batch: object) -> hardware.accelerators.Peaks | None:
    """Run one step on an accelerator, from an empty cache; return its peaks of allocated and reserved bytes.

    None for a step on the CPU, which then did not run.
    """
    place = _place_of(step)
    if place.type == "cpu":
        return None
    gc.collect()
    hardware.accelerators.release_cache()
    return _peak_there(step, batch, place)


def _peak_there(step: StepProgram, batch: object, place: torch.device) -> hardware.accelerators.Peaks:
    """Run a step on an accelerator; return its peaks without the device's other tensors."""
    resident = resident_bytes(step, place.type)
    for reference in _external_storages(step):
        if (storage := reference()) is not None and storage.device.type == place.type:
            resident[storage_key(storage)] = storage.nbytes()
        del storage
    own_bytes = sum(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for nbytes in resident.values())
    device = hardware.accelerators
    device.synchronize(place)
    held_bytes, reserved_bytes = device.allocated_bytes(place), device.reserved_bytes(place)
    device.reset_peaks(place)
    step(batch)
    device.synchronize(place)
    found = device.peaks(place)
    if found is None:
        raise UsageError(f"PyTorch does not count the peak of {place}: steps there can't be measured")
    beside_bytes = max(0, held_bytes - own_bytes)
    cached_bytes = max(0, reserved_bytes - held_bytes)
    # What others hold was reserved for them; the cache at the beginning was this step's, or anybody's.
    own_reserved_bytes = max(0, found.reserved_bytes - beside_bytes - cached_bytes)
    return device.Peaks(found.allocated_bytes - beside_bytes, own_reserved_bytes)


def measure_peak_bytes(step: StepProgram, batch: object) -> int:
    """Run one step that is not the first, and return its peak of allocated bytes.

    Tensors held between steps count by their storages, all others by the allocator's events, or on an accelerator by
    its allocator's statistics, whatever else is on the device.
    """
    place = _place_of(step)
    if place.type != "cpu":
        return _peak_there(step, batch, place).allocated_bytes
    resident, external = resident_bytes(step), _external_storages(step)
    with allocated() as meter:
        step(batch)
    for storage in (reference() for reference in external):
        if storage is not None:  # the step did not replace it
            resident[storage_key(storage)] = storage.nbytes()
    return sum(resident.values()) + step.held_bytes + meter.peak_bytes

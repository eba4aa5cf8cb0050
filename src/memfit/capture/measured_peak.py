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


def _held_by(step: StepProgram) -> tuple[dict[int, int], list[weakref.ref[torch.UntypedStorage]]]:
    """Return the bytes by storage that are held between steps, and the storages of tensors outside the model.

    The former are of parameters, buffers, optimizer state and the workload's batch, the latter such as a teacher's;
    gradients count too. On an accelerator only those there count: step counters of optimizers are on the CPU.
    """
    workload, place = step.workload, _place_of(step).type
    batch, outside = tensors_of(workload.batch), external_tensors(workload)
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *batch]
    tensors += [p for group in workload.optimizer.param_groups for p in group["params"]]
    tensors += [t for values in workload.optimizer.state.values() for t in tensors_of(values)]
    tensors += [t.grad for t in batch if t.is_leaf and t.grad is not None]
    outside += [t.grad for t in outside if t.is_leaf and t.grad is not None]
    own, others = (
        [weakref.ref(part.untyped_storage()) for t in each for part in parts(t) if place in ("cpu", part.device.type)]
        for each in (tensors, outside)
    )
    return _sizes(own), others


def _sizes(storages: list[weakref.ref[torch.UntypedStorage]]) -> dict[int, int]:
    return {storage_key(held): held.nbytes() for storage in storages if (held := storage()) is not None}


def _place_of(step: StepProgram) -> torch.device:
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
    resident, external = _held_by(step)
    resident |= _sizes(external)
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
    resident, external = _held_by(step)
    with allocated() as meter:
        step(batch)
    resident |= _sizes(external)  # of those that the step did not replace
    return sum(resident.values()) + step.held_bytes + meter.peak_bytes

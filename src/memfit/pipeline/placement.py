"""Where a plan runs: its device, a workload's move to it, and the ranks that this process has joined or joins."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from memfit import ir
from memfit.capture import external_tensors
from memfit.errors import PlanError, UsageError, WorkloadError
from memfit.hardware import KINDS, devices, find_device, match
from memfit.ir import Device, Plan
from memfit.levers import check_plan, check_workload, used_whole
from memfit.ranks import Initialisation, SingleProcess, check_same, check_shared, is_on_meta, launched_size
from memfit.training import on_device
from memfit.workload import Workload, described, tensors_of


def device_named(device: str | torch.device | None, workload: Workload) -> str:
    """Return the name of the device to predict or run on: the one that is given, or the one that the model is on."""
    if isinstance(device, str | torch.device):
        return str(device)
    if device is not None:
        raise UsageError(f"device is {described(device)}, not a name: write device='cpu', 'cuda', or 'cuda:0'")
    place = place_of(workload)
    return "cpu" if place.type in ("cpu", "meta") else f"{place.type}:{place.index or 0}"


def place_of(workload: Workload) -> torch.device:
    held = [*workload.model.parameters(), *workload.model.buffers()]
    return held[0].device if held else torch.device("cpu")


def on_this_machine(named: Device) -> Device | None:
    """Return this machine's device that is meant: by its name, or by its product; None without one."""
    if named.is_here:
        return named
    here = (device for device in devices() if device.kind == named.kind != "cpu")
    return next((device for device in here if match(device.description, device.memory_bytes, [named])), None)


def device_kind(model: torch.nn.Module) -> str:
    """Return the kind of the device that a model is on."""
    return next((p.device.type for p in model.parameters()), "cpu")


def check_runs_here(plan: Plan, workload: Workload, *, makes_values: bool = False) -> torch.device:
    """Check that a plan is for a workload, and that both can be run and measured here; return where.

    With `makes_values` a model on the meta device may stand for the values that its modules make.
    """
    device = on_this_machine(find_device(plan.device))
    if device is None:
        names = ", ".join(device.name for device in devices())
        raise PlanError(
            f"the plan was made for device={plan.device!r}, which is not on this machine ({names}): make one with"
            " device='cpu', or run the plan on a machine that has it"
        )
    if makes_values and is_on_meta(workload.model):
        Initialisation(workload.model)
    elif is_on_meta(workload.model):
        raise WorkloadError("Workload.model is on torch.device('meta') and has no data: build it on the CPU")
    _check_place(workload, device, plan)
    check_workload(workload, device)
    check_plan(plan, workload)
    return torch.device(device.name)


def placed(workload: Workload, plan: Plan) -> Workload:
    """Return a workload on the device that its plan was made for, where that is here.

    What is on the CPU is moved, as `model.to(device)` moves it: the model, the optimizer's state and tensors that the
    loss function holds in place, so that references to them stay good, and the batch by a copy. A model on the meta
    device makes its values on the CPU first (`ranks.meta_models`); where it is to be fully sharded, it does so when it
    is. A workload for a device that is not here is returned as it is.
    """
    device = on_this_machine(find_device(plan.device))
    if device is None:
        return workload
    if is_on_meta(workload.model):
        initialisation = Initialisation(workload.model)
        if plan.levers.sharding is not None and plan.levers.sharding.is_fully_sharded:
            return workload
        initialisation.run()
    _check_place(workload, device, plan)
    place = torch.device(device.name)
    if place.type == "cpu":
        return workload
    if plan.levers.sharding is not None:
        place = rank_place(place)
    behind: dict[Any, torch.Tensor] = {}  # what a lever moves itself, and less of it than there is room for
    if place.type in KINDS:
        for lever in used_whole(plan.levers):
            staying = (p for p in lever.stays_behind(plan.levers, workload.model) if p.device.type == "cpu")
            behind |= {parameter: parameter.data for parameter in staying}
    for parameter in behind:
        parameter.data = parameter.new_empty(0)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    try:  # `Module.to` gives parameters other memory where PyTorch itself knows the kind, and else makes new ones
        torch.__future__.set_swap_module_params_on_conversion(swaps or place.type not in KINDS)
        workload.model.to(place)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        for parameter, values in behind.items():
            parameter.data, parameter.memfit_place = values, place
    for tensor in external_tensors(workload):
        if tensor.device.type != "cpu":
            continue
        moved = tensor.detach().to(place)
        if place.type in KINDS:
            tensor.data = moved
        elif isinstance(tensor, torch.nn.Parameter):
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(moved, tensor.requires_grad))
        else:
            torch.utils.swap_tensors(tensor, moved.requires_grad_(tensor.requires_grad))
    state = tensors_of(list(workload.optimizer.state.values()))
    if any(tensor.device.type == "cpu" for tensor in state if tensor.dim() > 0):  # step counters stay where they are
        workload.optimizer.load_state_dict(workload.optimizer.state_dict())  # which puts it where parameters are
    return dataclasses.replace(workload, batch=on_device(workload.batch, place))


def rank_place(place: torch.device) -> torch.device:
    """Return the device of this rank, of the kind of a device: each rank has its own accelerator."""
    return place if place.type == "cpu" else torch.device(place.type, torch.accelerator.current_device_index())


def _check_place(workload: Workload, device: Device, plan: Plan) -> None:
    place = place_of(workload)
    if plan.levers.sharding is not None and place.type == device.kind:
        return
    if place.type in ("cpu", "meta") or str(place) == device.name or (place.type == device.kind and not place.index):
        return
    way = "workload.model.cpu()" if device.kind == "cpu" else f"workload.model.to({device.name!r})"
    raise WorkloadError(
        f"Workload.model is on {place}, and the plan was made for device={device.name!r}: move it with {way} before its"
        f" optimizer is made, or make a plan with device={str(place)!r}"
    )


# Ranks


def ranks_here() -> SingleProcess:
    """Return the ranks of the process group that this process has joined; a single process where it has joined none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return SingleProcess()
    from memfit.ranks import Group  # distributed packages take a second to import

    return Group("cpu")  # what it sends are objects, which go where the backend asks for


def check_launched(plan: Plan) -> None:
    """Refuse a plan of one process where a launcher has started several."""
    if plan.levers.sharding is None:
        remedy = f"start one process, without torchrun, or make a plan with world_size={launched_size()}"
        check_shared(1, "the plan", remedy)


@contextlib.contextmanager
def ranks_of(plan: Plan) -> Iterator[SingleProcess]:
    """Be one of the ranks that a plan is for, until the context is left."""
    check_launched(plan)
    if plan.levers.sharding is None:
        yield SingleProcess()
        return
    from memfit.ranks import check_size, joined

    with joined(find_device(plan.device).kind) as ranks:
        check_size(plan.levers.sharding, ranks.size)
        check_same(ranks, "plans", ir.codec.encode(plan))
        yield ranks


def joined_by(workload: Workload) -> contextlib.AbstractContextManager[object]:
    """Be one of the ranks that a launcher has started, if it has started several, until the context is left."""
    if launched_size() == 1:
        return contextlib.nullcontext()
    from memfit.ranks import joined  # distributed packages take a second to import

    kind = place_of(workload).type
    return joined("cpu" if kind == "meta" else kind)

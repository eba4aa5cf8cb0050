"""Activation checkpointing: regions whose forward pass runs again in the backward pass; their offload to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

from msgspec.structs import replace
from torch import nn

from memfit.ir import Levers
from memfit.levers.conflicts import JITTOR, NO_LINK, Conflict
from memfit.levers.lever import Lever, LeversOn, NotOffered, Rung, Setting
from memfit.recomputation import checkpointed, is_checkpointed
from memfit.workload import Workload

_SOLVE_SECONDS = 0.5  # for each rung: within a few percent of the best
ACTIVATION_OFFLOAD = "activation offload"


class Checkpointing(Lever):
    """Recomputation of regions, chosen by the solver."""

    name = "activation checkpointing"
    field = "regions"
    switchable = True
    recomputes = True

    def setting(self, on: LeversOn) -> str:
        return f"{_counted(on.levers, 'module')} recomputed"

    def brief(self, on: LeversOn) -> str:
        return _counted(on.levers, "region")

    def switches(self, levers: Levers) -> bool:
        return levers.compiler == "none"  # else they are part of the compiled code

    def on_model(self, levers: Levers, model: nn.Module) -> AbstractContextManager[None]:
        return checkpointed(model, levers.regions) if self.switches(levers) else contextlib.nullcontext()

    def is_applied(self, workload: Workload) -> bool:
        return is_checkpointed(workload.model)

    def rungs(self) -> Mapping[str, Rung]:
        return {"selective checkpointing": _selective, "full checkpointing": _full}


def _counted(levers: Levers, noun: str) -> str:
    return f"{len(levers.regions):,} {noun}{'s' * (len(levers.regions) != 1)}"


def _selective(step: Setting, levers: Levers) -> tuple[Levers, str]:
    """Checkpoint as is fastest within the budget, or halfway down to the lowest peak where that is no bound."""
    combination = step.combination(replace(levers, regions=()))
    plain, lowest = combination.plain().peak_bytes, combination.leanest(_SOLVE_SECONDS).peak_bytes
    budget_bytes = step.budget_bytes
    is_bound = budget_bytes is not None and lowest <= budget_bytes < plain
    within = budget_bytes if budget_bytes is not None and is_bound else (plain + lowest) // 2
    point = combination.fastest(within, 0.01, _SOLVE_SECONDS)
    return _named(levers, combination.levers if point is None else point.levers)


def _full(step: Setting, levers: Levers) -> tuple[Levers, str]:
    """Checkpoint for the lowest peak."""
    combination = step.combination(replace(levers, regions=()))
    lowest = combination.leanest(_SOLVE_SECONDS)
    return _named(levers, combination.candidate(lowest, lowest.peak_bytes).levers)


def _named(before: Levers, chosen: Levers) -> tuple[Levers, str]:
    if not chosen.regions or chosen == before:
        raise NotOffered("no choice of modules lowers the peak further")
    keeping = sum(bool(region.keep) for region in chosen.regions)
    return chosen, f"{len(chosen.regions)} regions, {keeping} of them keep operators"


class ActivationOffload(Lever):
    """Offload of regions, a part of checkpointing: it is chosen by the same solver, and applied with the regions."""

    name = ACTIVATION_OFFLOAD
    field = "regions"
    switchable = True
    conflicts = (
        Conflict(
            ACTIVATION_OFFLOAD,
            NO_LINK,
            "the speed of copies to the host is unknown, or the device has none",
            "leave out host_budget, or name a GPU with a known link_bytes_per_second",
        ),
        Conflict(ACTIVATION_OFFLOAD, JITTOR, "Jittor moves memory itself", "leave out offload="),
    )

    def setting(self, on: LeversOn) -> str:
        return f"{_offloading(on.levers):,} of them offloaded to host memory"

    def brief(self, on: LeversOn) -> str:
        return f"{_offloading(on.levers):,} offloaded"

    def without(self, on: LeversOn) -> Levers:
        return replace(on.levers, regions=tuple(replace(region, offload=False) for region in on.levers.regions))

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        return host_budget_bytes

    def rungs(self) -> Mapping[str, Rung]:
        return {"offload": _nowhere}


def _offloading(levers: Levers) -> int:
    return sum(region.offload for region in levers.regions)


def _nowhere(step: Setting, levers: Levers) -> tuple[Levers, str]:
    raise NotOffered("for GPUs only, and not a rung: memfit.plan with host_budget= chooses the regions to offload")

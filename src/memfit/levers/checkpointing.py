"""Activation checkpointing: regions whose forward pass runs again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

from msgspec.structs import replace
from torch import nn

from memfit.ir.plan import Levers
from memfit.levers.lever import Lever, LeversOn, NotOffered, Rung, Setting
from memfit.recomputation.regions import checkpointed, is_checkpointed
from memfit.workload import Workload

_SOLVE_SECONDS = 0.5  # for each rung: within a few percent of the best


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

"""Activation offload: what a region keeps for its recomputation waits in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from memfit.ir.plan import Levers
from memfit.levers.conflicts import JITTOR, NO_LINK, Conflict
from memfit.levers.lever import Lever, LeversOn, NotOffered, Rung, Setting

ACTIVATION_OFFLOAD = "activation offload"


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

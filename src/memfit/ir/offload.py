"""Offload of a region: the storages kept for its recomputation wait in host memory.

For each call of the region:

1. An argument that has a gradient, and each output that the region keeps, is copied to the host once it is computed, in
   parallel to the computation; its storage is held until the end of the module's forward pass, which waits for the
   copy.
2. It is copied back before the recomputation: when the backward pass enters the module `Region.prefetch`, or when the
   recomputation starts. The recomputation waits for copies that are not complete.
3. The copy is held until the end of the recomputation, or of autograd's save of it.

Copies run at the link's rate, one after the other in each direction, and both directions at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.ir.operator_costs import CostTable
from memfit.ir.remat import RegionCall, Regions

Floats = npt.NDArray[np.float64]

LEAST_BYTES = 2**16
"""Smaller storages stay on the device: the launch of a copy costs more than it saves."""

COPY_OUT, COPY_IN, WAIT = "memfit.copy_out.default", "memfit.copy_in.default", "memfit.wait.default"
"""The operators of an applied step that copy to the host and back, and that wait for a copy."""


@dataclass(frozen=True)
class Transfer:
    """A storage that waits in host memory.

    Attributes:
        storage: Index into `Trace.storages`.
        call: The module call that sends it.
        landed: The last forward operator at which the copy to the host holds it.
        fetched: The backward operator just before which it is copied back; -1 when the recomputation starts.
        death: The last backward operator at which the recomputation's saves hold it; -1 if none does.
    """

    storage: int
    call: int
    landed: int
    fetched: int
    death: int


def transfers(regions: Regions, region: RegionCall, kept: frozenset[int], prefetch: str) -> tuple[Transfer, ...]:
    """Return the storages of a region call that wait in host memory."""
    trace = regions.trace
    fetched = _fetched(regions, region, prefetch)
    deaths: dict[int, int] = {}
    for save in (trace.saves[index] for index in region.saves):
        deaths[save.storage] = max(save.death, deaths.get(save.storage, -1))
    moved: dict[int, Transfer] = {}
    for call in region.calls:
        start, end = trace.calls[call].start, trace.calls[call].end
        arguments = [s for s in trace.calls[call].activations if s in region.inputs]
        outputs = [s for op in sorted(kept) if start <= op < end for s in trace.births[op]]
        for storage in (*arguments, *outputs):
            if trace.storages[storage].nbytes >= LEAST_BYTES and storage not in moved:
                moved[storage] = Transfer(storage, call, end - 1, fetched, deaths.get(storage, -1))
    return tuple(moved.values())


def _fetched(regions: Regions, region: RegionCall, prefetch: str) -> int:
    for call in regions.later_siblings(region):
        if regions.trace.fqn_of(call) == prefetch:
            start = regions.backward_start.get(call, -1)
            return start if start < region.recompute_at else -1
    return -1


def host_bytes(regions: Regions, moved: Sequence[Transfer]) -> int:
    """Return the pinned memory of transfers, for the microbatch with the most.

    PyTorch's allocator of pinned memory rounds each tensor up to a power of two.
    """
    total: dict[int, int] = {}
    for transfer in moved:
        microbatch = regions.trace.calls[transfer.call].microbatch
        rounded = 1 << (regions.trace.storages[transfer.storage].nbytes - 1).bit_length()
        total[microbatch] = total.get(microbatch, 0) + rounded
    return max(total.values(), default=0)


def stall_seconds(
    regions: Regions, costs: CostTable, seconds: Floats, region: RegionCall, moved: Sequence[Transfer]
) -> float:
    """Return how long one run of a region call waits for transfers that the computation does not hide."""
    total = fetch_stall_seconds(regions, costs, seconds, region, moved)
    for call in region.calls:
        hidden = seconds[regions.trace.calls[call].start : regions.trace.calls[call].end].sum()
        total += max(0.0, _copy_seconds(regions, costs, [t for t in moved if t.call == call]) - hidden)
    return float(total)


def fetch_stall_seconds(
    regions: Regions, costs: CostTable, seconds: Floats, region: RegionCall, moved: Sequence[Transfer]
) -> float:
    """Return how long the recomputation of a region call waits for copies back; see `stall_seconds`."""
    hidden = seconds[moved[0].fetched : region.recompute_at].sum() if moved and moved[0].fetched >= 0 else 0.0
    return float(max(0.0, _copy_seconds(regions, costs, moved) - hidden))


def _copy_seconds(regions: Regions, costs: CostTable, moved: Sequence[Transfer]) -> float:
    """Return the time of copies in one direction; infinite where nothing is known of the link."""
    nbytes = sum(regions.trace.storages[m.storage].nbytes for m in moved)
    if not nbytes:
        return 0.0
    return nbytes / costs.link_bytes_per_second if costs.link_bytes_per_second else float("inf")

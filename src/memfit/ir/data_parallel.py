"""One rank of DistributedDataParallel, and of ZeroRedundancyOptimizer within it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from memfit.ir.insertion import Insertion
from memfit.ir.ranks import Sharding, gradients_by_parameter
from memfit.ir.trace import Parameter, Trace

_BROADCAST_BYTES = 2 * 250 * 2**20  # two buckets of buffers are under way at a time
_BROADCAST = "c10d.broadcast"


def buckets(sizes: Iterable[int], sharding: Sharding) -> list[int]:
    """Return the bytes of DDP's buckets: filled in the order in which gradients become ready, until they are full.

    As `_compute_bucket_assignment_by_size` does when the Reducer builds its buckets again after the first step.
    """
    found: list[int] = []
    now = 0
    for nbytes in sizes:
        now += nbytes
        if now >= (sharding.bucket_cap_bytes if found else sharding.first_bucket_bytes):
            found.append(now)
            now = 0
    return [*found, now] if now else found


def data_parallel(trace: Trace, sharding: Sharding) -> Trace:
    insertion = Insertion(trace)
    gradients = gradients_by_parameter(trace)
    by_itemsize: dict[int, list[int]] = defaultdict(list)
    for parameter, index in gradients.items():
        by_itemsize[trace.parameters[parameter].itemsize].append(trace.storages[index].nbytes)
        if sharding.gradient_as_bucket_view:
            insertion.free(index, _end_of_node(trace, trace.storages[index].birth))
    for sizes in by_itemsize.values():
        for nbytes in buckets(sizes, sharding):
            insertion.allocate(nbytes, -1, "gradients", -1)
    _broadcast_buffers(insertion)
    return insertion.result()


def _end_of_node(trace: Trace, op: int) -> int:
    """Return the last operator of a module call's backward pass in a row: by then its gradients were copied."""
    last = op
    while last + 1 < len(trace.ops) and trace.ops[last + 1].call == trace.ops[op].call >= 0:
        last += 1
    return last


def _broadcast_buffers(insertion: Insertion) -> None:
    """Put the flat copies in with which DDP sends rank 0's buffers before each forward pass."""
    trace = insertion.trace
    nbytes = sum(s.nbytes for s in trace.storages if s.category == "buffers")
    seen: set[int] = set()
    for index, op in enumerate(trace.ops):
        if nbytes and op.phase == "forward" and op.microbatch not in seen:
            seen.add(op.microbatch)
            event = insertion.op(_BROADCAST, nbytes, index, like=index, call=-1)
            insertion.allocate(min(nbytes, _BROADCAST_BYTES), event, "temporaries", -1).death = event


def with_state_of_one_rank(trace: Trace, world_size: int) -> Trace:
    """Keep the optimizer's state and temporaries for the parameters of the rank that has most."""
    state: dict[int, int] = defaultdict(int)
    for storage in trace.storages:
        if storage.category == "optimizer state":
            state[storage.parameter] += storage.nbytes
    ranks = partition(trace.parameters, world_size)
    owned = max(ranks, key=lambda rank: sum(state[p] for p in rank))
    storages = [
        replace(s, nbytes=0) if s.category == "optimizer state" and s.parameter >= 0 and s.parameter not in owned else s
        for s in trace.storages
    ]
    wanted: dict[int, int] = defaultdict(int)
    for parameter in owned:
        wanted[trace.parameters[parameter].nbytes] += 1
    sizes = {parameter.nbytes for parameter in trace.parameters}
    for op, born in zip(trace.ops, trace.births, strict=True):
        left = dict(wanted)
        for index in born if op.phase == "optimizer" else ():
            nbytes = storages[index].nbytes
            if storages[index].category == "temporaries" and nbytes in sizes:
                left[nbytes] = left.get(nbytes, 0) - 1
                storages[index] = storages[index] if left[nbytes] >= 0 else replace(storages[index], nbytes=0)
    return replace(trace, storages=storages)


def partition(parameters: Sequence[Parameter], world_size: int) -> list[list[int]]:
    """Return the parameters of each rank: by group, the largest first, each to the rank with least so far."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    numels = [math.prod(p.shape) for p in parameters]
    for index in sorted(range(len(parameters)), key=lambda i: (parameters[i].group, -numels[i])):
        if parameters[index].group >= 0:
            rank = loads.index(min(loads))
            ranks[rank].append(index)
            loads[rank] += numels[index]
    return ranks

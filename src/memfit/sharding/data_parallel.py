"""One rank of DistributedDataParallel, and of ZeroRedundancyOptimizer inside it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from memfit.ir.collectives import BROADCAST, REDUCE
from memfit.ir.sharding import Sharding
from memfit.ir.trace import Parameter, Trace
from memfit.sharding.groups import gradients_by_parameter
from memfit.sharding.insertion import Insertion

_BROADCAST_BYTES = 2 * 250 * 2**20  # two buckets of buffers are in flight at a time


def buckets(sizes: Iterable[int], sharding: Sharding) -> list[int]:
    """Return the bytes of DDP's buckets, which gradients fill in the order in which they become ready.

    They are those of `_compute_bucket_assignment_by_size` when the Reducer rebuilds its buckets after the first step.
    """
    full: list[int] = []
    current = 0
    for nbytes in sizes:
        current += nbytes
        if current >= (sharding.bucket_cap_bytes if full else sharding.first_bucket_bytes):
            full.append(current)
            current = 0
    return [*full, current] if current else full


def data_parallel(trace: Trace, sharding: Sharding) -> Trace:
    insertion = Insertion(trace)
    gradients = gradients_by_parameter(trace)
    last = _last_additions(trace, gradients) if sharding.reduces == "last" else {}
    by_itemsize: dict[int, list[int]] = defaultdict(list)
    for parameter, index in gradients.items():
        by_itemsize[trace.parameters[parameter].itemsize].append(trace.storages[index].nbytes)
        if sharding.gradient_as_bucket_view:
            insertion.free(index, _end_of_node(trace, last.get(parameter, trace.storages[index].birth)))
    ends = _backward_ends(trace)
    for sizes in by_itemsize.values():
        for nbytes in buckets(sizes, sharding):
            insertion.allocate(nbytes, -1, "gradients", -1)
            for end in ends if sharding.reduces == "each" else ends[-1:]:
                insertion.op(REDUCE, nbytes, end + 1, like=end, call=-1, ranks=sharding.world_size)
    _broadcast_buffers(insertion, sharding.world_size)
    return insertion.result()


def _last_additions(trace: Trace, gradients: dict[int, int]) -> dict[int, int]:
    """Return, by parameter, the operator that adds the last microbatch's gradient to those before."""
    of_storage = {index: parameter for parameter, index in gradients.items()}
    found: dict[int, int] = {}
    for position, op in enumerate(trace.ops):
        if op.phase == "backward" and len(op.mutates) == 1 and op.mutates[0] in of_storage:
            found[of_storage[op.mutates[0]]] = position
    return found


def _backward_ends(trace: Trace) -> list[int]:
    """Return the last operator of each microbatch's backward pass."""
    ends: dict[int, int] = {}
    for position, op in enumerate(trace.ops):
        if op.phase in ("backward", "recompute"):
            ends[op.microbatch] = position
    return [ends[microbatch] for microbatch in sorted(ends)]


def _end_of_node(trace: Trace, op: int) -> int:
    """Return the last consecutive operator of a module call's backward pass, by which its gradients were copied."""
    last = op
    while last + 1 < len(trace.ops) and trace.ops[last + 1].call == trace.ops[op].call >= 0:
        last += 1
    return last


def _broadcast_buffers(insertion: Insertion, ranks: int) -> None:
    """Insert the flat copies with which DDP broadcasts rank 0's buffers before each forward pass."""
    trace = insertion.trace
    nbytes = sum(s.nbytes for s in trace.storages if s.category == "buffers")
    seen: set[int] = set()
    for index, op in enumerate(trace.ops):
        if nbytes and op.phase == "forward" and op.microbatch not in seen:
            seen.add(op.microbatch)
            event = insertion.op(BROADCAST, nbytes, index, like=index, call=-1, ranks=ranks)
            insertion.allocate(min(nbytes, _BROADCAST_BYTES), event, "temporaries", -1).death = event


def with_state_of_one_rank(trace: Trace, world_size: int) -> Trace:
    """Keep the optimizer state and temporaries only of the rank with the most state."""
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
        remaining = dict(wanted)
        for index in born if op.phase == "optimizer" else ():
            nbytes = storages[index].nbytes
            if storages[index].category == "temporaries" and nbytes in sizes:
                remaining[nbytes] = remaining.get(nbytes, 0) - 1
                storages[index] = storages[index] if remaining[nbytes] >= 0 else replace(storages[index], nbytes=0)
    return replace(trace, storages=storages)


def partition(parameters: Sequence[Parameter], world_size: int) -> list[list[int]]:
    """Return the parameters of each rank: by group, largest first, each assigned to the rank with the fewest so far."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    numels = [math.prod(p.shape) for p in parameters]
    for index in sorted(range(len(parameters)), key=lambda i: (parameters[i].group, -numels[i])):
        if parameters[index].group >= 0:
            rank = loads.index(min(loads))
            ranks[rank].append(index)
            loads[rank] += numels[index]
    return ranks

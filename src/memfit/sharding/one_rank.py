"""Data-parallel training on paper: the step of one rank of many, from the step of a single process.

Each mode follows PyTorch's allocations, in the order of its Python code (torch 2.13):

- "ddp" (`torch/nn/parallel/distributed.py`, the C++ `Reducer`): gradient buckets stay allocated from the
  first step on; gradients are copied into them, or are views of them (`gradient_as_bucket_view`).
- "zero1" (`torch/distributed/optim/zero_redundancy_optimizer.py`, inside DDP): the state of each parameter
  lives on the rank that `_partition_parameters` assigns it to, the largest first to the least loaded.
- "zero3" (`torch/distributed/fsdp/_fully_shard`, FSDP2): the hooks of `fully_shard` on each unit and on the
  root. `FullyShard` replays `FSDPParamGroup.pre_forward`, `post_forward`, `pre_backward` and
  `post_backward`, with their buffers (`_fsdp_collectives.py`: `foreach_all_gather`, `foreach_reduce`).
- "zero2": FSDP2 with `reshard_after_forward=False`, PyTorch's equivalent: parameters are kept
  gathered from their first forward pass to the end of their backward pass.

The stages are those of S. Rajbhandari, J. Rasley, O. Ruwase, Y. He (SC 2020), "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models". Theirs shard one flat buffer; PyTorch's shard the first dimension
of each parameter (FSDP2) or whole parameters (zero1), so that shards are rounded up. The trace is that of
the rank that holds most: rank 0 for FSDP2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.collectives import BROADCAST, GATHER, REDUCE, SCATTER
from memfit.ir.sharding import MODES as MODES
from memfit.ir.sharding import Mode as Mode
from memfit.ir.sharding import Sharding as Sharding
from memfit.ir.simulate import repeats
from memfit.ir.trace import Parameter, Trace
from memfit.sharding.fully_shard import FullyShard
from memfit.sharding.groups import gradients_by_parameter
from memfit.sharding.groups import repeated_blocks as repeated_blocks
from memfit.sharding.insertion import Insertion, with_shares


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that each rank sends in one step.

    Attributes:
        all_gather_bytes: Bytes of all-gathers of parameters; for zero1 of broadcasts of the updated ones.
        reduce_scatter_bytes: Bytes of reduce-scatters of gradients.
        all_reduce_bytes: Bytes of all-reduces of gradients.
        seconds: Time of all of them over the link, one after another.
    """

    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    seconds: float


def shard(trace: Trace, sharding: Sharding) -> Trace:
    """Return the step of the rank that holds the most bytes, as a trace for `simulate`.

    Collectives are inserted as operators, which are not in a cost table of the original trace: they take the time of a
    dispatch. With several microbatches each one reduces its gradients, as PyTorch does by default (without `no_sync` or
    `set_requires_gradient_sync`).

    Args:
        trace: The step of one rank with its own batch. A checkpointed region should be a unit, or lie in one.
        sharding: The sharding.

    Raises:
        UsageError: `sharding` does not fit the trace.
    """
    _check(trace, sharding)
    if sharding.mode in ("zero2", "zero3"):
        return replace(FullyShard(trace, sharding).result(), sharding=sharding)
    replicated = replace(data_parallel(trace, sharding), sharding=sharding)
    return with_state_of_one_rank(replicated, sharding.world_size) if sharding.mode == "zero1" else replicated


def of_engine(trace: Trace, engine: Sharding | None) -> Trace:
    """Return the step of one rank of an engine, by its memory and its time; the step as it is for no engine."""
    return trace if engine is None else with_share_of_update(shard(trace, engine), engine)


def with_share_of_update(trace: Trace, sharding: Sharding) -> Trace:
    """Return a sharded step whose optimizer does one rank's share of the work, to predict its time, not its memory.

    With "ddp" every rank does all of the update.
    """
    if sharding.mode == "ddp":
        return trace
    return with_shares(trace, [i for i, op in enumerate(trace.ops) if op.phase == "optimizer"], sharding.world_size)


def communication(trace: Trace, sharding: Sharding, link_bytes_per_second: float) -> Communication:
    """Return the bytes that each rank sends in one step with ring algorithms, and their time.

    A rank of N sends B·(N−1)/N of B bytes in an all-gather, a reduce-scatter or a pipelined broadcast, and twice that
    in an all-reduce. This assumes full use of the link in one direction, no latency, and no overlap with computation: a
    step takes at least the longer of both times, and at most their sum.

    Args:
        trace: The step of one rank, as for `shard`.
        sharding: The sharding.
        link_bytes_per_second: Bandwidth of a rank's link (> 0).

    Raises:
        UsageError: `sharding` does not fit the trace, or the rate is not positive.
    """
    if not link_bytes_per_second > 0:
        raise UsageError(f"link_bytes_per_second={link_bytes_per_second} is not above 0: give the rate of one link")
    _check(trace, sharding)
    gathered = scattered = reduced = 0.0
    if sharding.mode in ("zero2", "zero3"):
        sharded = shard(trace, sharding)
        gathered, scattered = _moved(sharded, GATHER), _moved(sharded, SCATTER)
    else:
        reduced = (
            2.0 * trace.scale_microbatches * sum(trace.parameters[p].nbytes for p in gradients_by_parameter(trace))
        )
        gathered = float(sum(p.nbytes for p in trace.parameters if p.group >= 0)) if sharding.mode == "zero1" else 0.0
    share = (sharding.world_size - 1) / sharding.world_size
    sent = [round(total * share) for total in (gathered, scattered, reduced)]
    return Communication(
        all_gather_bytes=sent[0],
        reduce_scatter_bytes=sent[1],
        all_reduce_bytes=sent[2],
        seconds=sum(sent) / link_bytes_per_second,
    )


def _check(trace: Trace, sharding: Sharding) -> None:
    if sharding.world_size < 1:
        raise UsageError(f"world_size={sharding.world_size} is not above 0: give the number of ranks")
    if sharding.mode not in MODES:
        raise UsageError(f"mode={sharding.mode!r} is unknown: use one of {', '.join(MODES)}")
    if not trace.parameters:
        raise UsageError(f"the trace of {trace.workload!r} has no list of parameters: capture it again")
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    unknown = [fqn for fqn in sharding.units or () if fqn not in called or not fqn]
    if unknown:
        raise UsageError(
            f"units= has {', '.join(map(repr, unknown))}, not called in the forward pass of {trace.workload!r}: give"
            " FQNs of modules below the root, or None for the repeated blocks"
        )


def _moved(trace: Trace, name: str) -> float:
    """Return the bytes that all collectives of a name move in the real step: as many for a smaller microbatch."""
    return sum(
        trace.works[op.signature].write_bytes * float(math.ceil(times))
        for op, times in zip(trace.ops, repeats(trace), strict=True)
        if op.name == name
    )


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


SEARCHED: tuple[Mode, ...] = ("ddp", "zero2", "zero3")


def proposals(world_size: int, modes: Sequence[Mode], units: tuple[str, ...], ranks_per_node: int) -> list[Sharding]:
    """Return shardings of a step, the simplest first.

    Over several nodes what is fully sharded may be cut within each node, with a copy in each (hybrid sharding), so that
    parameters are gathered over the faster link. Of units, the last half may stay gathered: they are the first to be
    needed again.

    Args:
        world_size: Ranks (> 1).
        modes: What may be sharded.
        units: FQNs of the modules that are gathered by themselves.
        ranks_per_node: Ranks of one node (> 0).
    """
    found: list[Sharding] = []
    for mode in modes:
        if mode == "ddp":
            found.append(Sharding(world_size=world_size, mode=mode, gradient_as_bucket_view=True))
            continue
        sharding = Sharding(world_size=world_size, mode=mode, units=units)
        nodes = world_size // ranks_per_node if world_size % ranks_per_node == 0 else 1
        replicas = [1, nodes] if nodes > 1 else [1]
        kept = [(), units[len(units) // 2 :]] if mode == "zero3" and len(units) > 1 else [()]
        found += [
            Sharding(world_size=world_size, mode=mode, units=sharding.units, kept=of, replicas=count)
            for count in replicas
            for of in kept
        ]
    return found

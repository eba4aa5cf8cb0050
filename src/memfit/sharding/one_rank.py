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

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.collectives import GATHER, SCATTER
from memfit.ir.sharding import MODES as MODES
from memfit.ir.sharding import Mode as Mode
from memfit.ir.sharding import Sharding as Sharding
from memfit.ir.simulate import repeats
from memfit.ir.trace import Trace
from memfit.sharding.data_parallel import data_parallel, with_state_of_one_rank
from memfit.sharding.fully_shard import FullyShard
from memfit.sharding.groups import gradients_by_parameter
from memfit.sharding.groups import repeated_blocks as repeated_blocks
from memfit.sharding.shares import with_shares


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

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir import (
    BROADCAST,
    GATHER,
    REDUCE,
    SCATTER,
    SHARDS_IN,
    SHARDS_OUT,
    Parameter,
    Storage,
    Trace,
)
from memfit.ir import MODES as MODES
from memfit.ir import Mode as Mode
from memfit.ir import Sharding as Sharding
from memfit.ranks.insertion import ITEMSIZES, InsertedStorage, Insertion, gradients_by_parameter, innermost, with_shares
from memfit.ranks.insertion import repeated_blocks as repeated_blocks

_WEIGHING = ("aten.detach.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten._to_copy.default")
_SCALAR_BYTES = 8


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
        for op, times in zip(trace.ops, trace.repeats, strict=True)
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
    insertion, ranks = Insertion(trace), sharding.world_size
    gradients = gradients_by_parameter(trace)
    of_storage = {index: parameter for parameter, index in gradients.items()}
    last: dict[int, int] = {}  # by parameter, the operator that adds the last microbatch's gradient to those before
    ends: dict[int, int] = {}  # of each microbatch's backward pass
    for position, op in enumerate(trace.ops):
        if op.phase == "backward" and len(op.mutates) == 1 and op.mutates[0] in of_storage:
            last[of_storage[op.mutates[0]]] = position
        if op.phase in ("backward", "recompute"):
            ends[op.microbatch] = position
    by_itemsize: dict[int, list[int]] = defaultdict(list)
    for parameter, index in gradients.items():
        ready = trace.storages[index].birth
        by_itemsize[trace.parameters[parameter].itemsize].append(trace.storages[index].nbytes)
        if sharding.gradient_as_bucket_view:
            end = last.get(parameter, ready) if sharding.reduces == "last" else ready
            # Copied by the last consecutive operator of a module call's backward pass.
            while end + 1 < len(trace.ops) and trace.ops[end + 1].call == trace.ops[end].call >= 0:
                end += 1
            insertion.free(index, end)
    reduced = [ends[microbatch] for microbatch in sorted(ends)]
    for sizes in by_itemsize.values():
        for nbytes in buckets(sizes, sharding):
            insertion.allocate(nbytes, -1, "gradients", -1)
            for end in reduced if sharding.reduces == "each" else reduced[-1:]:
                insertion.op(REDUCE, nbytes, end + 1, like=end, call=-1, ranks=ranks)
    # Flat copies, by which DDP broadcasts rank 0's buffers before each forward pass.
    nbytes = sum(s.nbytes for s in trace.storages if s.category == "buffers")
    seen: set[int] = set()
    for index, op in enumerate(trace.ops):
        if nbytes and op.phase == "forward" and op.microbatch not in seen:
            seen.add(op.microbatch)
            event = insertion.op(BROADCAST, nbytes, index, like=index, call=-1, ranks=ranks)
            insertion.allocate(min(nbytes, _BROADCAST_BYTES), event, "temporaries", -1).death = event
    return insertion.result()


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


@dataclass(eq=False)
class _Unit:
    """A parameter group of FSDP2, with its present allocations."""

    fqn: str
    owner: int
    parameters: list[int] = field(default_factory=list)
    full: list[InsertedStorage] = field(default_factory=list)
    pending: InsertedStorage | None = None
    reduced: bool = False


@dataclass(eq=False)
class _Pass:
    """One forward call of a unit, and its backward pass: [start, end) and [opens, closes)."""

    unit: _Unit
    call: int
    start: int
    end: int
    opens: int = -1
    closes: int = -1


class FullyShard:
    """A replay of `fully_shard`'s hooks over a recorded step."""

    def __init__(self, trace: Trace, sharding: Sharding) -> None:
        self.old, self.sharding = trace, sharding
        self.insertion = Insertion(trace)
        names = ("", *(repeated_blocks(trace) if sharding.units is None else sharding.units))
        owners = {module.fqn: index for index, module in enumerate(trace.modules)}
        self.units = {fqn: _Unit(fqn, owners[fqn]) for fqn in names}
        for index, parameter in enumerate(trace.parameters):
            self.units[innermost(parameter.fqn, self.units)].parameters.append(index)
        self.gradients = gradients_by_parameter(trace)
        # For (parameter, microbatch), the storage of its gradient and the operator that completes it.
        self.ready = {(p, 0): (index, trace.storages[index].birth) for p, index in self.gradients.items()}
        parameter_of = {index: parameter for parameter, index in self.gradients.items()}
        dying: dict[int, list[int]] = defaultdict(list)
        for index, storage in enumerate(trace.storages):
            dying[storage.death].append(index)
        for position, op in enumerate(trace.ops):
            of = parameter_of.get(op.mutates[0], -1) if len(op.mutates) == 1 else -1
            if op.phase == "backward" and op.microbatch > 0 and of >= 0:  # accumulated
                nbytes = trace.storages[self.gradients[of]].nbytes
                added = [i for i in dying[position] if trace.storages[i].nbytes == nbytes]
                if added:
                    held = self.gradients[of] if sharding.reduces == "last" else added[-1]
                    self.ready[of, op.microbatch] = held, position
        self.order: list[_Pass] = []
        self.held: InsertedStorage | None = None  # the last output of an all-gather in the forward pass
        self.reducing: InsertedStorage | None = None  # the last input of a reduce-scatter
        for microbatch in range(trace.microbatches):
            self._run(microbatch)

    def _run(self, microbatch: int) -> None:
        """Run the hooks of a microbatch in their order."""
        passes = self._forward_passes(microbatch)
        backward = [
            i for i, op in enumerate(self.old.ops)
            if op.microbatch == microbatch and op.phase in ("backward", "recompute")
        ]  # fmt: skip
        ready = {at for (_, m), (_, at) in self.ready.items() if m == microbatch}
        while backward and self.old.ops[backward[-1]].call < 0 and backward[-1] not in ready:
            backward.pop()  # it ends with the last operator of a module or a gradient
        if not backward:
            return
        self._find_backward(passes, microbatch, backward)
        root, last = passes[0], backward[-1] + 1
        hooks: list[tuple[tuple[int, int, int], Callable[[_Pass, int], None], _Pass, int]] = []
        for i, each in enumerate(passes):
            final = each.closes >= last
            hooks.append(((each.start, 1, i), self._pre_forward, each, each.start))
            hooks.append(((each.end, 0, -i), self._post_forward, each, each.end))
            if each.opens >= 0:
                hooks.append(((each.opens, 1, i), self._pre_backward, each, each.opens))
                hooks.append(((each.closes, 0, i if final else -i), self._post_backward, each, each.closes))
        self.order, self.root = [], root
        for _, hook, each, position in sorted(hooks, key=lambda item: item[0]):
            hook(each, position)
        # Pending ones are for a backward pass that never came, as frozen units have none.
        self._free(last, self.reducing, *(unit.pending for unit in self.units.values()))
        self.reducing = None
        for unit in self.units.values():
            unit.pending = None

    def _forward_passes(self, microbatch: int) -> list[_Pass]:
        """Return the forward calls of the units, the root's first."""
        trace = self.old
        calls = [(i, c) for i, c in enumerate(trace.calls) if c.phase == "forward" and c.microbatch == microbatch]
        of_unit = [(trace.fqn_of(i), i, c) for i, c in calls if c.end > c.start]
        inner = [_Pass(self.units[fqn], i, c.start, c.end) for fqn, i, c in of_unit if fqn and fqn in self.units]
        # The engine wraps the loss function. The step weighs the loss, and adds it to those of other microbatches.
        loss = [i for i, op in enumerate(trace.ops) if op.phase == "forward" and op.microbatch == microbatch]
        while (
            loss
            and (op := trace.ops[loss[-1]]).name in _WEIGHING
            and trace.works[op.signature].write_bytes <= _SCALAR_BYTES
        ):
            loss.pop()
        start, end = min(c.start for _, c in calls), max([*(c.end for _, c in calls), *(i + 1 for i in loss[-1:])])
        return [_Pass(self.units[""], calls[0][0], start, end), *inner]

    def _find_backward(self, passes: list[_Pass], microbatch: int, backward: list[int]) -> None:
        """Set the beginning and end of the backward pass of each forward call."""
        by_call = {each.call: each for each in passes[1:]}
        by_unit = {each.unit.fqn: each for each in reversed(passes[1:])}
        for index in backward:
            op = self.old.ops[index]
            each = next((by_call[call] for call in self.old.call_chain(op.call) if call in by_call), None)
            if each is None and op.call >= 0:  # recomputed operators are matched by their module
                each = by_unit.get(innermost(self.old.fqn_of(op.call), self.units))
            if each is not None:
                each.opens = index if each.opens < 0 else each.opens
                each.closes = index + 1
        for (parameter, m), (_, at) in self.ready.items():
            first = by_unit.get(innermost(self.old.parameters[parameter].fqn, self.units))
            if m == microbatch and first is not None:
                first.opens = at if first.opens < 0 else first.opens
                first.closes = max(first.closes, at + 1)
        for each in passes[1:]:  # sums of gradients belong to no module, and come before the hook
            while 0 <= each.closes <= backward[-1] and self.old.ops[each.closes].call < 0:
                each.closes += 1
        in_model = [i for i in backward if self.old.ops[i].call >= 0]
        passes[0].opens, passes[0].closes = (in_model or backward)[0], backward[-1] + 1

    # The hooks, as in _fsdp_param_group.py

    def _pre_forward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters or unit.full:
            return
        self._gather(each, position)
        self._copy_out(each, position)
        self._free(position, self.held)  # a local of `wait_for_unshard` keeps it until that returns
        self.held, unit.pending = unit.pending, None

    def _post_forward(self, each: _Pass, position: int) -> None:
        if each.unit.parameters:
            again = self.sharding.mode == "zero3" and each.unit.fqn not in self.sharding.kept
            if again and each is not self.root:
                self._reshard(each.unit, position)
            self.order.append(each)
        if each is self.root:
            self._free(position, self.held)
            self.held = None

    def _pre_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters:
            return
        if not unit.full:
            self._gather(each, position)
            gathered, unit.pending = unit.pending, None
            self._copy_out(each, position)
            self._free(position, gathered)
        before = self.order.index(each) - 1
        if before >= 0 and not self.order[before].unit.full:
            self._gather(self.order[before], position)

    def _post_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        self._reshard(unit, position)
        self._free(position, self.reducing)
        self.reducing = None
        microbatch = self.old.ops[position - 1].microbatch
        if self.sharding.reduces == "last" and microbatch < self.old.microbatches - 1:
            return
        ready = {
            p: self.ready.pop((p, microbatch))[0]
            for p in unit.parameters
            if self.ready.get((p, microbatch), (0, position))[1] < position
        }
        if ready:
            self._reduce(each, position, ready)

    def _gather(self, each: _Pass, position: int) -> None:
        """Start an all-gather: allocate its output, and the cast shards where dtypes differ."""
        if self.sharding.shards == 1 or each.unit.pending is not None:
            return
        nbytes = sum(self._full_bytes(p) for p in each.unit.parameters)
        event = self.insertion.op(GATHER, nbytes, position, like=position, call=each.call, ranks=self.sharding.shards)
        if self.sharding.shard_itemsize is not None:
            cast = self.insertion.allocate(nbytes // self.sharding.shards, event, "temporaries", each.unit.owner)
            cast.death = event
        each.unit.pending = self.insertion.allocate(nbytes, event, "temporaries", each.unit.owner)

    def _copy_out(self, each: _Pass, position: int) -> None:
        """Finish an all-gather: each parameter gets a storage of its own."""
        nbytes = sum(self._full_bytes(p) for p in each.unit.parameters)
        event = self.insertion.op(SHARDS_OUT, nbytes, position, like=position, call=each.call)
        each.unit.full = [
            self.insertion.allocate(self._full_bytes(p), event, "parameters", each.unit.owner, p)
            for p in each.unit.parameters
        ]

    def _reshard(self, unit: _Unit, position: int) -> None:
        self._free(position, *unit.full)
        unit.full = []

    def _free(self, position: int, *blocks: InsertedStorage | None) -> None:
        for block in blocks:
            if block is not None:
                block.death = self.insertion.before(position)

    def _reduce(self, each: _Pass, position: int, ready: dict[int, int]) -> None:
        """Copy gradients into one buffer, and reduce it to this rank's shards."""
        numel, world = sum(self._padded(p) for p in ready), self.sharding.shards
        itemsize = self.old.parameters[next(iter(ready))].itemsize
        reduce, shards = self.sharding.reduce_itemsize or itemsize, self.sharding.shard_itemsize or itemsize
        owner, end = each.unit.owner, position - 1
        padded = sum(self._padded(p) for p in ready if (self.old.parameters[p].shape or (1,))[0] % world) * reduce
        copied = self.insertion.op(SHARDS_IN, numel * reduce, position, like=end, call=each.call, padded_bytes=padded)
        self.reducing = self.insertion.allocate(numel * reduce, copied, "temporaries", owner)
        for index in ready.values():
            self.insertion.free(index, copied)
        scattered = self.insertion.op(SCATTER, numel * reduce, position, like=end, call=each.call, ranks=world)
        if reduce != shards:
            self.insertion.allocate(numel // world * reduce, scattered, "temporaries", owner).death = scattered
        shard = self.insertion.allocate(numel // world * shards, scattered, "gradients", owner)
        if each.unit.reduced:  # added to the shards that are there
            shard.death = scattered
        else:
            last = max(self.old.storages[self.gradients[p]].death for p in ready)
            shard.death = None if last >= len(self.old.ops) else last
        each.unit.reduced = True

    # Sizes

    def _padded(self, parameter: int) -> int:
        """Return the elements of a gathered parameter, with the first dimension rounded up for all ranks."""
        shape, world = self.old.parameters[parameter].shape or (1,), self.sharding.shards
        return -(-shape[0] // world) * world * math.prod(shape[1:])

    def _full_bytes(self, parameter: int) -> int:
        return self._padded(parameter) * self.old.parameters[parameter].itemsize

    def result(self) -> Trace:
        """Return the sharded step, with resident storages and the optimizer's in shards."""
        sharded = self.insertion.result()
        sizes: dict[int, int] = defaultdict(int)
        for index, parameter in enumerate(self.old.parameters):
            shards = self._padded(index) // self.sharding.shards * (self.sharding.shard_itemsize or parameter.itemsize)
            sizes[parameter.nbytes] = max(sizes[parameter.nbytes], shards)

        def in_shards(storage: Storage) -> Storage:
            nbytes = storage.nbytes
            if storage.parameter >= 0 and storage.category in ("parameters", "optimizer state"):
                parameter = self.old.parameters[storage.parameter]
                itemsize = next((n for n in ITEMSIZES if math.prod(parameter.shape) * n == nbytes), None)
                if nbytes == parameter.nbytes:
                    itemsize = self.sharding.shard_itemsize or parameter.itemsize
                if itemsize is not None:  # storages of another size, as step counts, are not sharded
                    nbytes = self._padded(storage.parameter) // self.sharding.shards * itemsize
            elif storage.birth >= 0 and sharded.ops[storage.birth].phase == "optimizer":
                nbytes = sizes.get(nbytes, nbytes)
            return replace(storage, nbytes=nbytes)

        resident = len(self.old.storages)
        storages = [*map(in_shards, sharded.storages[:resident]), *sharded.storages[resident:]]
        return replace(sharded, storages=storages)


SEARCHED: tuple[Mode, ...] = ("ddp", "zero2", "zero3")


def proposals(world_size: int, modes: Sequence[Mode], units: tuple[str, ...], ranks_per_node: int) -> list[Sharding]:
    """Return shardings of a step, the simplest first.

    Over several nodes what is fully sharded may be cut within each node, with a copy in each (hybrid sharding), so that
    parameters are gathered over the faster link. Of units, the last half may stay gathered: they are the first to be
    needed again.
    """
    nodes = world_size // ranks_per_node if world_size % ranks_per_node == 0 else 1
    found: list[Sharding] = []
    for mode in modes:
        if mode == "ddp":
            found.append(Sharding(world_size=world_size, mode=mode, gradient_as_bucket_view=True))
            continue
        kept = [(), units[len(units) // 2 :]] if mode == "zero3" and len(units) > 1 else [()]
        found += [
            Sharding(world_size=world_size, mode=mode, units=units, kept=of, replicas=count)
            for count in ([1, nodes] if nodes > 1 else [1])
            for of in kept
        ]
    return found

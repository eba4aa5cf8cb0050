"""Data-parallel training on paper: what one rank of many holds, from the step of a single rank.

Each mode follows what PyTorch allocates, in the order of its Python code (torch 2.13):

- "ddp" (`torch/nn/parallel/distributed.py`, the C++ `Reducer`): gradient buckets stay allocated from the
  first step on; gradients are copied into them, or are views of them (`gradient_as_bucket_view`).
- "zero1" (`torch/distributed/optim/zero_redundancy_optimizer.py`, inside DDP): the state of each parameter
  lives on the one rank that `_partition_parameters` gives it to, the largest first to the least loaded.
- "zero3" (`torch/distributed/fsdp/_fully_shard`, FSDP2): the hooks of `fully_shard` on each unit and on the
  root. `_FullyShard` replays `FSDPParamGroup.pre_forward`, `post_forward`, `pre_backward` and
  `post_backward`, with their buffers (`_fsdp_collectives.py`: `foreach_all_gather`, `foreach_reduce`).
- "zero2": FSDP2 with `reshard_after_forward=False`, which is what PyTorch has of it: parameters are kept
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
from typing import Literal

import msgspec
from msgspec.structs import replace

from memfit.errors import UsageError
from memfit.ir.insertion import Block, Insertion, Moment
from memfit.ir.simulate import repeats
from memfit.ir.trace import Op, Parameter, Storage, Trace

Mode = Literal["ddp", "zero1", "zero2", "zero3"]
MODES: tuple[Mode, ...] = ("ddp", "zero1", "zero2", "zero3")

_MIB = 2**20
_BROADCAST_BYTES = 2 * 250 * _MIB  # two buckets of buffers are under way at a time
_CONTAINERS = ("ModuleList", "Sequential")
_ITEMSIZES = (1, 2, 4, 8)
_GATHER, _COPY_OUT = "fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy"
_COPY_IN, _SCATTER = "fsdp.chunk_cat", "c10d.reduce_scatter"
_BROADCAST = "c10d.broadcast"


class Sharding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is spread over ranks. The batch of the trace is that of each rank.

    Attributes:
        world_size: Ranks (> 0).
        mode: What is divided among them.
        units: For zero2 and zero3, FQNs of the modules that `fully_shard` is called on, besides the root. None:
            the repeated blocks (`repeated_blocks`).
        gradient_as_bucket_view: For ddp and zero1, as DistributedDataParallel takes it.
        bucket_cap_bytes: For ddp and zero1: the size from which a bucket is full.
        first_bucket_bytes: The same for the bucket that is ready first.
        shard_itemsize: For zero2 and zero3: bytes of an element of the sharded parameters, where the optimizer
            works on others than the model computes with: 4 for `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`,
            with a trace of the model in bf16. None: as in the trace.
        reduce_itemsize: The same of the gradients while they are reduced (`reduce_dtype`). None: as in the trace.
    """

    world_size: int
    mode: Mode
    units: tuple[str, ...] | None = None
    gradient_as_bucket_view: bool = False
    bucket_cap_bytes: int = 25 * _MIB
    first_bucket_bytes: int = _MIB
    shard_itemsize: int | None = None
    reduce_itemsize: int | None = None


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank sends in one step.

    Attributes:
        all_gather_bytes: Gathers of parameters; for zero1 the broadcasts of the updated ones.
        reduce_scatter_bytes: Of gradients.
        all_reduce_bytes: Of gradients.
        seconds: All of it over the link, one after another.
    """

    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    seconds: float


def shard(trace: Trace, sharding: Sharding) -> Trace:
    """Return the step as the rank that holds most runs it: what `simulate` takes, with or without a selection.

    Collectives are put in as operators, which a cost table of the original trace does not know: they take the
    time of a dispatch. With several microbatches each one reduces its gradients, as PyTorch does unless told
    otherwise (`no_sync`, `set_requires_gradient_sync`).

    Args:
        trace: The step of one rank with its own batch. A region of a selection should be a unit, or lie in one.
        sharding: How it is spread.

    Raises:
        UsageError: `sharding` does not fit the trace.
    """
    _check(trace, sharding)
    if sharding.mode in ("zero2", "zero3"):
        return _FullyShard(trace, sharding).result()
    replicated = _data_parallel(trace, sharding)
    return _with_state_of_one_rank(replicated, sharding.world_size) if sharding.mode == "zero1" else replicated


def communication(trace: Trace, sharding: Sharding, link_bytes_per_second: float) -> Communication:
    """Return what each rank sends in one step, with ring algorithms, and how long that takes by itself.

    Of B bytes a rank of N sends B·(N−1)/N in an all-gather, a reduce-scatter or a broadcast passed on, and twice
    that in an all-reduce. Assumed are full use of the link in one direction, no latency, and nothing hidden
    behind computation: a step takes at least the longer of both, at most their sum.

    Args:
        trace: The step of one rank, as `shard` takes it.
        sharding: How it is spread.
        link_bytes_per_second: What a rank sends at most (> 0).

    Raises:
        UsageError: `sharding` does not fit the trace, or the rate is not positive.
    """
    if not link_bytes_per_second > 0:
        raise UsageError(f"link_bytes_per_second={link_bytes_per_second} is not above 0: give the rate of one link")
    _check(trace, sharding)
    gathered = scattered = reduced = 0.0
    if sharding.mode in ("zero2", "zero3"):
        sharded = shard(trace, sharding)
        gathered, scattered = _moved(sharded, _GATHER), _moved(sharded, _SCATTER)
    else:
        reduced = 2.0 * trace.scale_microbatches * sum(trace.parameters[p].nbytes for p in _gradients(trace))
        gathered = float(sum(p.nbytes for p in trace.parameters if p.group >= 0)) if sharding.mode == "zero1" else 0.0
    share = (sharding.world_size - 1) / sharding.world_size
    sent = [round(total * share) for total in (gathered, scattered, reduced)]
    return Communication(
        all_gather_bytes=sent[0],
        reduce_scatter_bytes=sent[1],
        all_reduce_bytes=sent[2],
        seconds=sum(sent) / link_bytes_per_second,
    )


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Return the FQNs of a model's blocks: called children of a ModuleList or Sequential that have a sibling of
    their kind, and parameters; the outermost ones.
    """
    kinds = {module.fqn: module.kind for module in trace.modules}
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    siblings: dict[tuple[str, str], int] = defaultdict(int)
    for fqn, kind in kinds.items():
        siblings[_parent(fqn), kind] += 1
    found: list[str] = []
    for fqn, kind in kinds.items():
        listed = fqn in called and kinds.get(_parent(fqn)) in _CONTAINERS and siblings[_parent(fqn), kind] > 1
        filled = any(_within(parameter.fqn, fqn) for parameter in trace.parameters)
        if fqn and listed and filled and not any(_within(fqn, outer) for outer in found):
            found.append(fqn)
    return tuple(found)


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _within(fqn: str, outer: str) -> bool:
    return not outer or f"{fqn}.".startswith(f"{outer}.")


def _check(trace: Trace, sharding: Sharding) -> None:
    if sharding.world_size < 1:
        raise UsageError(f"world_size={sharding.world_size} is not above 0: give the number of ranks")
    if sharding.mode not in MODES:
        raise UsageError(f"mode={sharding.mode!r} is none of {', '.join(MODES)}")
    if not trace.parameters:
        raise UsageError(f"the trace of {trace.workload!r} does not say what its parameters are: capture it again")
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    unknown = [fqn for fqn in sharding.units or () if fqn not in called or not fqn]
    if unknown:
        raise UsageError(
            f"units= names {', '.join(map(repr, unknown))}, which the forward pass of {trace.workload!r} does not call:"
            " give FQNs of modules below the root, or None for the repeated blocks"
        )


def _gradients(trace: Trace) -> dict[int, int]:
    """Return the storages of gradients by parameter, in the order in which they become ready."""
    found = [(s.birth, i) for i, s in enumerate(trace.storages) if s.category == "gradients" and s.parameter >= 0]
    return {trace.storages[index].parameter: index for _, index in sorted(found)}


def _moved(trace: Trace, name: str) -> float:
    """Return the bytes that all operators of a name move in the real step."""
    return sum(
        trace.works[op.signature].write_bytes * float(times)
        for op, times in zip(trace.ops, repeats(trace), strict=True)
        if op.name == name
    )


# DistributedDataParallel


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


def _data_parallel(trace: Trace, sharding: Sharding) -> Trace:
    insertion = Insertion(trace)
    gradients = _gradients(trace)
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


# ZeroRedundancyOptimizer


def _with_state_of_one_rank(trace: Trace, world_size: int) -> Trace:
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


# fully_shard


class _Unit:
    """A parameter group of FSDP2, and what is allocated for it at the moment."""

    def __init__(self, fqn: str, owner: int) -> None:
        self.fqn, self.owner = fqn, owner
        self.parameters: list[int] = []
        self.full: list[Block] = []
        self.pending: Block | None = None
        self.reduced = False


class _Pass:
    """One forward call of a unit, and its backward pass: [start, end) and [opens, closes)."""

    def __init__(self, unit: _Unit, call: int, start: int, end: int) -> None:
        self.unit, self.call, self.start, self.end = unit, call, start, end
        self.opens = self.closes = -1


class _FullyShard:
    """Replays the hooks of `fully_shard` over a recorded step."""

    def __init__(self, trace: Trace, sharding: Sharding) -> None:
        self.old, self.sharding = trace, sharding
        self.insertion = Insertion(trace)
        self.units = self._find_units()
        self.gradients = _gradients(trace)
        self.ready = self._ready_gradients()
        self.order: list[_Pass] = []
        self.held: Block | None = None  # the last output of an all-gather in the forward pass
        self.reducing: Block | None = None  # the last input of a reduce-scatter
        for microbatch in range(trace.microbatches):
            self._run(microbatch)

    def _find_units(self) -> dict[str, _Unit]:
        names = ("", *(repeated_blocks(self.old) if self.sharding.units is None else self.sharding.units))
        position = {module.fqn: index for index, module in enumerate(self.old.modules)}
        units = {fqn: _Unit(fqn, position[fqn]) for fqn in names}
        for index, parameter in enumerate(self.old.parameters):
            units[_innermost(parameter.fqn, units)].parameters.append(index)
        return units

    def _ready_gradients(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return for (parameter, microbatch) the storage of its gradient and the operator that completes it."""
        ready = {(p, 0): (index, self.old.storages[index].birth) for p, index in self.gradients.items()}
        parameter_of = {index: parameter for parameter, index in self.gradients.items()}
        dying: dict[int, list[int]] = defaultdict(list)
        for index, storage in enumerate(self.old.storages):
            dying[storage.death].append(index)
        for position, op in enumerate(self.old.ops):
            parameter = parameter_of.get(op.mutates[0], -1) if len(op.mutates) == 1 else -1
            if op.phase == "backward" and op.microbatch > 0 and parameter >= 0:  # accumulated
                nbytes = self.old.storages[self.gradients[parameter]].nbytes
                added = [i for i in dying[position] if self.old.storages[i].nbytes == nbytes]
                if added:
                    ready[parameter, op.microbatch] = (added[-1], position)
        return ready

    # The order of the hooks

    def _run(self, microbatch: int) -> None:
        passes = self._passes(microbatch)
        backward = self._backward_of(microbatch)
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
        if self.reducing is not None:
            self.reducing.death = self.insertion.before(last)
            self.reducing = None

    def _passes(self, microbatch: int) -> list[_Pass]:
        """Return the forward calls of the units, the root's first."""
        calls = [(i, c) for i, c in enumerate(self.old.calls) if c.phase == "forward" and c.microbatch == microbatch]
        inner = [
            _Pass(self.units[self.old.fqn_of(i)], i, c.start, c.end)
            for i, c in calls
            if self.old.fqn_of(i) in self.units and self.old.fqn_of(i) and c.end > c.start
        ]
        start, end = min(c.start for _, c in calls), max(c.end for _, c in calls)
        return [_Pass(self.units[""], calls[0][0], start, end), *inner]

    def _backward_of(self, microbatch: int) -> list[int]:
        """Return the operators of a backward pass, up to the last that a module or a gradient has a part in."""
        found = [
            i for i, op in enumerate(self.old.ops)
            if op.microbatch == microbatch and op.phase in ("backward", "recompute")
        ]  # fmt: skip
        ready = {at for (_, m), (_, at) in self.ready.items() if m == microbatch}
        while found and self.old.ops[found[-1]].call < 0 and found[-1] not in ready:
            found.pop()
        return found

    def _find_backward(self, passes: list[_Pass], microbatch: int, backward: list[int]) -> None:
        """Find where the backward pass of each forward call begins and ends."""
        by_call = {each.call: each for each in passes[1:]}
        by_unit = {each.unit.fqn: each for each in reversed(passes[1:])}
        for index in backward:
            each = self._pass_of(self.old.ops[index], by_call, by_unit)
            if each is not None:
                each.opens = index if each.opens < 0 else each.opens
                each.closes = index + 1
        for (parameter, m), (_, at) in self.ready.items():
            first = by_unit.get(_innermost(self.old.parameters[parameter].fqn, self.units))
            if m == microbatch and first is not None:
                first.opens = at if first.opens < 0 else first.opens
                first.closes = max(first.closes, at + 1)
        for each in passes[1:]:  # sums of gradients belong to no module, and come before the hook
            while 0 <= each.closes <= backward[-1] and self.old.ops[each.closes].call < 0:
                each.closes += 1
        in_model = [i for i in backward if self.old.ops[i].call >= 0]
        passes[0].opens, passes[0].closes = (in_model or backward)[0], backward[-1] + 1

    def _pass_of(self, op: Op, by_call: dict[int, _Pass], by_unit: dict[str, _Pass]) -> _Pass | None:
        """Return the pass that a backward operator belongs to; recomputed ones are found by their module."""
        for call in self.old.call_chain(op.call):
            if call in by_call:
                return by_call[call]
        return by_unit.get(_innermost(self.old.fqn_of(op.call), self.units)) if op.call >= 0 else None

    # What the hooks do, as in _fsdp_param_group.py

    def _pre_forward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters or unit.full:
            return
        self._gather(each, position, position)
        self._copy_out(each, position, position)
        if self.held is not None:  # a local of `wait_for_unshard` keeps it until that returns
            self.held.death = self.insertion.before(position)
        self.held, unit.pending = unit.pending, None

    def _post_forward(self, each: _Pass, position: int) -> None:
        if each.unit.parameters:
            if self.sharding.mode == "zero3" and each is not self.root:
                self._reshard(each.unit, position)
            self.order.append(each)
        if each is self.root and self.held is not None:
            self.held.death = self.insertion.before(position)
            self.held = None

    def _pre_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters:
            return
        if not unit.full:
            self._gather(each, position, position)
            gathered, unit.pending = unit.pending, None
            self._copy_out(each, position, position)
            if gathered is not None:
                gathered.death = self.insertion.before(position)
        before = self.order.index(each) - 1
        if before >= 0 and not self.order[before].unit.full:
            self._gather(self.order[before], position, position)

    def _post_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        self._reshard(unit, position)
        if self.reducing is not None:
            self.reducing.death = self.insertion.before(position)
            self.reducing = None
        microbatch = self.old.ops[position - 1].microbatch
        ready = {
            p: self.ready.pop((p, microbatch))[0]
            for p in unit.parameters
            if self.ready.get((p, microbatch), (0, position))[1] < position
        }
        if ready:
            self._reduce(each, position, ready)

    def _gather(self, each: _Pass, position: int, like: int) -> None:
        """Start an all-gather: its output, and where dtypes differ the shards cast."""
        if self.sharding.world_size == 1 or each.unit.pending is not None:
            return
        nbytes = sum(self._full_bytes(p) for p in each.unit.parameters)
        event = self.insertion.op(_GATHER, nbytes, position, like=like, call=each.call)
        if self.sharding.shard_itemsize is not None:
            cast = self.insertion.allocate(nbytes // self.sharding.world_size, event, "temporaries", each.unit.owner)
            cast.death = event
        each.unit.pending = self.insertion.allocate(nbytes, event, "temporaries", each.unit.owner)

    def _copy_out(self, each: _Pass, position: int, like: int) -> None:
        """Finish an all-gather: each parameter gets a storage of its own."""
        nbytes = sum(self._full_bytes(p) for p in each.unit.parameters)
        event = self.insertion.op(_COPY_OUT, nbytes, position, like=like, call=each.call)
        each.unit.full = [
            self.insertion.allocate(self._full_bytes(p), event, "parameters", each.unit.owner, p)
            for p in each.unit.parameters
        ]

    def _reshard(self, unit: _Unit, position: int) -> None:
        for block in unit.full:
            block.death = self.insertion.before(position)
        unit.full = []

    def _reduce(self, each: _Pass, position: int, ready: dict[int, int]) -> None:
        """Copy gradients into one buffer, and reduce it to this rank's shards."""
        numel, world = sum(self._padded(p) for p in ready), self.sharding.world_size
        itemsize = self.old.parameters[next(iter(ready))].itemsize
        reduce, shards = self.sharding.reduce_itemsize or itemsize, self.sharding.shard_itemsize or itemsize
        owner, end = each.unit.owner, position - 1
        copied = self.insertion.op(_COPY_IN, numel * reduce, position, like=end, call=each.call)
        self.reducing = self.insertion.allocate(numel * reduce, copied, "temporaries", owner)
        for index in ready.values():
            self.insertion.free(index, copied)
        scattered = self.insertion.op(_SCATTER, numel * reduce, position, like=end, call=each.call)
        if reduce != shards:
            self.insertion.allocate(numel // world * reduce, scattered, "temporaries", owner).death = scattered
        kept = self.insertion.allocate(numel // world * shards, scattered, "gradients", owner)
        if each.unit.reduced:  # added to the shards that are there
            kept.death = scattered
        elif kept_until := self._gradients_end(ready):
            kept.death = kept_until
        each.unit.reduced = True

    def _gradients_end(self, ready: dict[int, int]) -> Moment | None:
        """Return until when the sharded gradients are kept."""
        last = max(self.old.storages[self.gradients[p]].death for p in ready)
        return None if last >= len(self.old.ops) else last

    # Sizes

    def _padded(self, parameter: int) -> int:
        """Return the elements of a gathered parameter, with the first dimension rounded up for all ranks."""
        shape, world = self.old.parameters[parameter].shape or (1,), self.sharding.world_size
        return -(-shape[0] // world) * world * math.prod(shape[1:])

    def _full_bytes(self, parameter: int) -> int:
        return self._padded(parameter) * self.old.parameters[parameter].itemsize

    def _shard_bytes(self, parameter: int, itemsize: int) -> int:
        return self._padded(parameter) // self.sharding.world_size * itemsize

    def result(self) -> Trace:
        """Return the sharded step: what is resident, and what the optimizer makes, in shards."""
        sharded = self.insertion.result()
        sizes: dict[int, int] = defaultdict(int)
        for index, parameter in enumerate(self.old.parameters):
            shards = self._shard_bytes(index, self.sharding.shard_itemsize or parameter.itemsize)
            sizes[parameter.nbytes] = max(sizes[parameter.nbytes], shards)
        resident = len(self.old.storages)
        storages = [
            self._in_shards(storage, sharded, sizes) if index < resident else storage
            for index, storage in enumerate(sharded.storages)
        ]
        return replace(sharded, storages=storages)

    def _in_shards(self, storage: Storage, sharded: Trace, sizes: dict[int, int]) -> Storage:
        if storage.parameter >= 0 and storage.category in ("parameters", "optimizer state"):
            return replace(storage, nbytes=self._sharded_bytes(storage))
        in_optimizer = storage.birth >= 0 and sharded.ops[storage.birth].phase == "optimizer"
        return replace(storage, nbytes=sizes.get(storage.nbytes, storage.nbytes)) if in_optimizer else storage

    def _sharded_bytes(self, storage: Storage) -> int:
        """Return a rank's share: all of what has not as many elements as the parameter, such as a step count."""
        parameter = self.old.parameters[storage.parameter]
        if storage.nbytes == parameter.nbytes:
            return self._shard_bytes(storage.parameter, self.sharding.shard_itemsize or parameter.itemsize)
        numel = math.prod(parameter.shape)
        itemsize = next((size for size in _ITEMSIZES if numel * size == storage.nbytes), None)
        return storage.nbytes if itemsize is None else self._shard_bytes(storage.parameter, itemsize)


def _innermost(fqn: str, units: Iterable[str]) -> str:
    """Return the unit that a module or parameter belongs to."""
    return max((unit for unit in units if _within(fqn, unit)), key=len)

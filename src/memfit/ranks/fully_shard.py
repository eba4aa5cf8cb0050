"""One rank of FSDP2: the allocations and frees of `fully_shard`'s hooks, replayed over a recorded step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from msgspec.structs import replace

from memfit.ir import GATHER, SCATTER, SHARDS_IN, SHARDS_OUT, Op, Sharding, Storage, Trace
from memfit.ranks.groups import gradients_by_parameter, innermost, repeated_blocks
from memfit.ranks.insertion import InsertedStorage, Insertion

_ITEMSIZES = (1, 2, 4, 8)
_WEIGHING = ("aten.detach.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten._to_copy.default")
_SCALAR_BYTES = 8


class _Unit:
    """A parameter group of FSDP2, with its present allocations."""

    def __init__(self, fqn: str, owner: int) -> None:
        self.fqn, self.owner = fqn, owner
        self.parameters: list[int] = []
        self.full: list[InsertedStorage] = []
        self.pending: InsertedStorage | None = None
        self.reduced = False


class _Pass:
    """One forward call of a unit, and its backward pass: [start, end) and [opens, closes)."""

    def __init__(self, unit: _Unit, call: int, start: int, end: int) -> None:
        self.unit, self.call, self.start, self.end = unit, call, start, end
        self.opens = self.closes = -1


class FullyShard:
    """A replay of `fully_shard`'s hooks over a recorded step."""

    def __init__(self, trace: Trace, sharding: Sharding) -> None:
        self.old, self.sharding = trace, sharding
        self.insertion = Insertion(trace)
        self.units = self._find_units()
        self.gradients = gradients_by_parameter(trace)
        self.ready = self._ready_gradients()
        self.order: list[_Pass] = []
        self.held: InsertedStorage | None = None  # the last output of an all-gather in the forward pass
        self.reducing: InsertedStorage | None = None  # the last input of a reduce-scatter
        for microbatch in range(trace.microbatches):
            self._run(microbatch)

    def _find_units(self) -> dict[str, _Unit]:
        names = ("", *(repeated_blocks(self.old) if self.sharding.units is None else self.sharding.units))
        position = {module.fqn: index for index, module in enumerate(self.old.modules)}
        units = {fqn: _Unit(fqn, position[fqn]) for fqn in names}
        for index, parameter in enumerate(self.old.parameters):
            units[innermost(parameter.fqn, units)].parameters.append(index)
        return units

    def _ready_gradients(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return, for (parameter, microbatch), the storage of its gradient and the operator that completes it."""
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
                    held = self.gradients[parameter] if self.sharding.reduces == "last" else added[-1]
                    ready[parameter, op.microbatch] = (held, position)
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
        self._free(self.reducing, last)
        self.reducing = None
        # Gathered ahead for a backward pass that never came, as frozen units have none.
        for unit in self.units.values():
            self._free(unit.pending, last)
            unit.pending = None

    def _passes(self, microbatch: int) -> list[_Pass]:
        """Return the forward calls of the units, the root's first."""
        calls = [(i, c) for i, c in enumerate(self.old.calls) if c.phase == "forward" and c.microbatch == microbatch]
        inner = [
            _Pass(self.units[self.old.fqn_of(i)], i, c.start, c.end)
            for i, c in calls
            if self.old.fqn_of(i) in self.units and self.old.fqn_of(i) and c.end > c.start
        ]
        start = min(c.start for _, c in calls)
        end = max(max(c.end for _, c in calls), self._end_of_loss(microbatch))  # the engine wraps the loss function
        return [_Pass(self.units[""], calls[0][0], start, end), *inner]

    def _end_of_loss(self, microbatch: int) -> int:
        """Return the operator after the loss; the step weighs that, and adds it to those of other microbatches."""
        forward = [i for i, op in enumerate(self.old.ops) if op.phase == "forward" and op.microbatch == microbatch]
        while forward and self._is_scalar(self.old.ops[forward[-1]]):
            forward.pop()
        return forward[-1] + 1 if forward else 0

    def _is_scalar(self, op: Op) -> bool:
        return op.name in _WEIGHING and self.old.works[op.signature].write_bytes <= _SCALAR_BYTES

    def _backward_of(self, microbatch: int) -> list[int]:
        """Return the operators of a backward pass, up to the last one of a module or a gradient."""
        backward = [
            i for i, op in enumerate(self.old.ops)
            if op.microbatch == microbatch and op.phase in ("backward", "recompute")
        ]  # fmt: skip
        ready = {at for (_, m), (_, at) in self.ready.items() if m == microbatch}
        while backward and self.old.ops[backward[-1]].call < 0 and backward[-1] not in ready:
            backward.pop()
        return backward

    def _find_backward(self, passes: list[_Pass], microbatch: int, backward: list[int]) -> None:
        """Set the beginning and end of the backward pass of each forward call."""
        by_call = {each.call: each for each in passes[1:]}
        by_unit = {each.unit.fqn: each for each in reversed(passes[1:])}
        for index in backward:
            each = self._pass_of(self.old.ops[index], by_call, by_unit)
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

    def _pass_of(self, op: Op, by_call: dict[int, _Pass], by_unit: dict[str, _Pass]) -> _Pass | None:
        """Return the pass of a backward operator; recomputed operators are matched by their module."""
        for call in self.old.call_chain(op.call):
            if call in by_call:
                return by_call[call]
        return by_unit.get(innermost(self.old.fqn_of(op.call), self.units)) if op.call >= 0 else None

    # The hooks, as in _fsdp_param_group.py

    def _pre_forward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters or unit.full:
            return
        self._gather(each, position)
        self._copy_out(each, position)
        if self.held is not None:  # a local of `wait_for_unshard` keeps it until that returns
            self.held.death = self.insertion.before(position)
        self.held, unit.pending = unit.pending, None

    def _post_forward(self, each: _Pass, position: int) -> None:
        if each.unit.parameters:
            again = self.sharding.mode == "zero3" and each.unit.fqn not in self.sharding.kept
            if again and each is not self.root:
                self._reshard(each.unit, position)
            self.order.append(each)
        if each is self.root:
            self._free(self.held, position)
            self.held = None

    def _pre_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        if not unit.parameters:
            return
        if not unit.full:
            self._gather(each, position)
            gathered, unit.pending = unit.pending, None
            self._copy_out(each, position)
            self._free(gathered, position)
        before = self.order.index(each) - 1
        if before >= 0 and not self.order[before].unit.full:
            self._gather(self.order[before], position)

    def _post_backward(self, each: _Pass, position: int) -> None:
        unit = each.unit
        self._reshard(unit, position)
        self._free(self.reducing, position)
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

    def _free(self, storage: InsertedStorage | None, position: int) -> None:
        """Free a storage, if there is one, right before an operator."""
        if storage is not None:
            storage.death = self.insertion.before(position)

    def _reshard(self, unit: _Unit, position: int) -> None:
        for storage in unit.full:
            self._free(storage, position)
        unit.full = []

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

    def _shard_bytes(self, parameter: int, itemsize: int) -> int:
        return self._padded(parameter) // self.sharding.shards * itemsize

    def result(self) -> Trace:
        """Return the sharded step, with resident storages and the optimizer's in shards."""
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
        """Return the bytes of a rank's share; storages of another size, as step counts, are not sharded."""
        parameter = self.old.parameters[storage.parameter]
        if storage.nbytes == parameter.nbytes:
            return self._shard_bytes(storage.parameter, self.sharding.shard_itemsize or parameter.itemsize)
        numel = math.prod(parameter.shape)
        itemsize = next((size for size in _ITEMSIZES if numel * size == storage.nbytes), None)
        return storage.nbytes if itemsize is None else self._shard_bytes(storage.parameter, itemsize)

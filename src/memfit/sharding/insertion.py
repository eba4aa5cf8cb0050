"""Insertion of operators and storages into a recorded step.

A moment is an operator of the original step, or an inserted one. Storages are alive from their moment of birth through
their moment of death, as in a trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from msgspec.structs import replace

from memfit.ir.trace import Call, Category, Op, Save, Storage, Trace, Work


@dataclass(eq=False)
class Inserted:
    """An operator that is inserted just before operator `before` of the original step."""

    before: int
    op: Op


Moment = int | Inserted
"""An operator of the original step, by its index, or an inserted one."""


@dataclass
class Block:
    """An inserted storage. `death` None: it outlives the step; `birth` -1: it exists before the step."""

    nbytes: int
    birth: Moment
    category: Category
    owner: int
    parameter: int = -1
    death: Moment | None = None


class Insertion:
    """The operators and storages to insert into a step, collected in the order of the step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.storages: list[Storage | Block] = list(trace.storages)
        self._inserted: list[Inserted] = []
        self._signatures: dict[str, int] = {}
        self._works: list[Work] = []

    def op(
        self, name: str, nbytes: int, before: int, *, like: int, call: int, ranks: int = 0, padded_bytes: int = 0
    ) -> Inserted:
        """Insert an operator that moves a number of bytes.

        Args:
            before: Index of the next operator of the original step; `len(ops)` for the end.
            like: Index of an operator with the same phase and microbatch.
            ranks: Those among which it is a collective; 0 for a copy.
            padded_bytes: Bytes that a CPU's kernel copies first, so that each shard is as long.
        """
        args = [nbytes, ranks] if ranks else [nbytes]
        body = {"op": name, "args": args} | ({"padded": padded_bytes} if padded_bytes else {})
        text = json.dumps(body, separators=(",", ":"))
        if text not in self._signatures:
            self._signatures[text] = len(self.trace.signatures) + len(self._works)
            self._works.append(Work(0, nbytes, nbytes, "", True))
        template = self.trace.ops[like]
        op = Op(name, call, template.phase, template.microbatch, self._signatures[text], (), False)
        self._inserted.append(Inserted(before, op))
        return self._inserted[-1]

    def before(self, position: int) -> Moment:
        """Return the last moment before an operator of the original step, insertions so far included."""
        last = self._inserted[-1] if self._inserted else None
        return last if last is not None and last.before == position else position - 1

    def allocate(self, nbytes: int, birth: Moment, category: Category, owner: int, parameter: int = -1) -> Block:
        """Insert a storage; set its `death` when it is freed."""
        block = Block(nbytes, birth, category, owner, parameter)
        self.storages.append(block)
        return block

    def free(self, index: int, death: Moment) -> None:
        """Move the death of a storage of the original step to another moment."""
        old = self.storages[index]
        assert isinstance(old, Storage)
        self.storages[index] = Block(old.nbytes, old.birth, old.category, old.owner, old.parameter, death)

    def result(self) -> Trace:
        """Return the step with all insertions."""
        new = _Renumbered(self.trace, sorted(self._inserted, key=lambda inserted: inserted.before))
        return replace(
            self.trace,
            calls=[new.call(call) for call in self.trace.calls],
            ops=new.ops,
            storages=[new.storage(storage) for storage in self.storages],
            saves=[new.save(save) for save in self.trace.saves],
            signatures=[*self.trace.signatures, *self._signatures],
            works=[*self.trace.works, *self._works],
        )


class _Renumbered:
    """The operators in their new order, and the new index of each moment."""

    def __init__(self, trace: Trace, inserted: list[Inserted]) -> None:
        self.ops: list[Op] = []
        self.position: list[int] = []
        self.of: dict[Inserted, int] = {}
        pending = list(reversed(inserted))
        for index in range(len(trace.ops) + 1):
            while pending and pending[-1].before == index:
                event = pending.pop()
                self.of[event] = len(self.ops)
                self.ops.append(event.op)
            self.position.append(len(self.ops))
            self.ops += trace.ops[index : index + 1]

    def at(self, moment: Moment | None) -> int:
        """Return the new index of a moment; the start and the end of the step stay -1 and `len(ops)`."""
        if moment is None:
            return len(self.ops)
        if isinstance(moment, Inserted):
            return self.of[moment]
        return moment if moment < 0 else self.position[moment]

    def call(self, call: Call) -> Call:
        end = self.at(call.end - 1) + 1 if call.end > call.start else self.at(call.start)
        return replace(call, start=self.at(call.start), end=end)

    def storage(self, old: Storage | Block) -> Storage:
        death = self.at(old.death)
        release, shape = (self.at(old.release), old.shape) if isinstance(old, Storage) else (death, ())
        return Storage(old.nbytes, self.at(old.birth), death, release, old.category, old.owner, old.parameter, shape)

    def save(self, save: Save) -> Save:
        return replace(save, at=self.at(save.at), unpacked=self.at(save.unpacked), death=self.at(save.death))

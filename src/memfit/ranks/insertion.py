"""Recorded steps for ranks: the grouping of their modules and gradients, and insertion of operators and storages.

A moment is an operator of the original step, or an inserted one. Storages are alive from their moment of birth through
their moment of death, as in a trace.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from memfit.ir import Call, Category, Op, Share, Storage, Trace, Work, enclosing

_CONTAINERS = ("ModuleList", "Sequential")
ITEMSIZES = (1, 2, 4, 8)


@dataclass(eq=False)
class InsertedOperator:
    """An operator that is inserted just before operator `before` of the original step."""

    before: int
    op: Op


Moment = int | InsertedOperator
"""An operator of the original step, by its index, or an inserted one."""


@dataclass
class InsertedStorage:
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
        self.storages: list[Storage | InsertedStorage] = list(trace.storages)
        self._inserted: list[InsertedOperator] = []
        self._signatures: dict[str, int] = {}
        self._works: list[Work] = []

    def op(
        self, name: str, nbytes: int, before: int, *, like: int, call: int, ranks: int = 0, padded_bytes: int = 0
    ) -> InsertedOperator:
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
        self._inserted.append(InsertedOperator(before, op))
        return self._inserted[-1]

    def before(self, position: int) -> Moment:
        """Return the last moment before an operator of the original step, insertions so far included."""
        last = self._inserted[-1] if self._inserted else None
        return last if last is not None and last.before == position else position - 1

    def allocate(
        self, nbytes: int, birth: Moment, category: Category, owner: int, parameter: int = -1
    ) -> InsertedStorage:
        """Insert a storage; set its `death` when it is freed."""
        block = InsertedStorage(nbytes, birth, category, owner, parameter)
        self.storages.append(block)
        return block

    def free(self, index: int, death: Moment) -> None:
        """Move the death of a storage of the original step to another moment."""
        old = self.storages[index]
        assert isinstance(old, Storage)
        self.storages[index] = InsertedStorage(old.nbytes, old.birth, old.category, old.owner, old.parameter, death)

    def result(self) -> Trace:
        """Return the step with all insertions."""
        ops: list[Op] = []
        position: list[int] = []  # the new index of each operator of the original step
        of: dict[InsertedOperator, int] = {}
        pending = sorted(self._inserted, key=lambda inserted: inserted.before)[::-1]
        for index in range(len(self.trace.ops) + 1):
            while pending and pending[-1].before == index:
                inserted = pending.pop()
                of[inserted] = len(ops)
                ops.append(inserted.op)
            position.append(len(ops))
            ops += self.trace.ops[index : index + 1]

        def at(moment: Moment | None) -> int:
            """Return the new index of a moment; the start and the end of the step stay -1 and `len(ops)`."""
            if moment is None:
                return len(ops)
            if isinstance(moment, InsertedOperator):
                return of[moment]
            return moment if moment < 0 else position[moment]

        def moved(call: Call) -> Call:
            end = at(call.end - 1) + 1 if call.end > call.start else at(call.start)
            return replace(call, start=at(call.start), end=end)

        def made(old: Storage | InsertedStorage) -> Storage:
            death = at(old.death)
            release, shape = (at(old.release), old.shape) if isinstance(old, Storage) else (death, ())
            return Storage(old.nbytes, at(old.birth), death, release, old.category, old.owner, old.parameter, shape)

        return replace(
            self.trace,
            calls=[moved(call) for call in self.trace.calls],
            ops=ops,
            storages=[made(storage) for storage in self.storages],
            saves=[replace(s, at=at(s.at), unpacked=at(s.unpacked), death=at(s.death)) for s in self.trace.saves],
            signatures=[*self.trace.signatures, *self._signatures],
            works=[*self.trace.works, *self._works],
        )


def with_shares(trace: Trace, positions: Iterable[int], ranks: int) -> Trace:
    """Return a step in which some operators do one rank's share of their work, to predict its time."""
    ops, signatures, works = list(trace.ops), list(trace.signatures), list(trace.works)
    of_share: dict[int, int] = {}
    for index in positions:
        op = ops[index]
        if op.signature not in of_share:
            of_share[op.signature] = len(signatures)
            signatures.append(Share(signatures[op.signature], ranks).text(op.name))
            work = works[op.signature]
            flops, read_bytes, write_bytes = (-(-n // ranks) for n in (work.flops, work.read_bytes, work.write_bytes))
            works.append(Work(flops, read_bytes, write_bytes, work.dtype, work.kernel))
        ops[index] = replace(op, signature=of_share[op.signature])
    return replace(trace, ops=ops, signatures=signatures, works=works)


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Return the FQNs of a model's repeated blocks.

    They are the outermost called children of a ModuleList or Sequential that have parameters and a sibling of their
    class.
    """
    kinds = {module.fqn: module.kind for module in trace.modules}
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    parents = {fqn: fqn.rpartition(".")[0] for fqn in kinds}
    siblings = Counter((parents[fqn], kind) for fqn, kind in kinds.items())
    filled = {fqn for parameter in trace.parameters for fqn in enclosing(parameter.fqn)}
    blocks: list[str] = []
    for fqn, kind in kinds.items():
        listed = fqn in called and kinds.get(parents[fqn]) in _CONTAINERS and siblings[parents[fqn], kind] > 1
        if fqn and listed and fqn in filled and enclosing(fqn).isdisjoint(blocks):
            blocks.append(fqn)
    return tuple(blocks)


def innermost(fqn: str, units: Iterable[str]) -> str:
    """Return the innermost unit that contains a module or parameter."""
    return max(enclosing(fqn).intersection(units), key=len)


def around(units: Iterable[str]) -> frozenset[str]:
    """Return the modules that hold a unit: recomputing one would gather its units once more."""
    return frozenset(fqn for unit in units for fqn in enclosing(unit) if fqn != unit)


def gradients_by_parameter(trace: Trace) -> dict[int, int]:
    """Return the storages of gradients by parameter, in the order in which they become ready."""
    births = [(s.birth, i) for i, s in enumerate(trace.storages) if s.category == "gradients" and s.parameter >= 0]
    return {trace.storages[index].parameter: index for _, index in sorted(births)}

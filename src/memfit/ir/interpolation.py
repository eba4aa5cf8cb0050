"""Steps of other sizes, from two that were captured.

The program of a step hardly depends on how many samples it has: the same operators, with tensors of other shapes. Of
two captured sizes, every number that differs (a dimension, a stride, bytes, operations) is taken to be affine in the
number of samples, which it is where samples are one dimension of a tensor. Where the two programs differ, a number
would not be whole, or libraries size their buffers as they like (recurrent layers), nothing is made up.
"""

from __future__ import annotations

import json
import operator
from typing import Any

from msgspec.structs import replace

from memfit.ir.operator_classes import RECURRENT, operator_class
from memfit.ir.trace import Storage, Trace, Work

_op_key = operator.attrgetter("name", "call", "phase", "microbatch", "mutates", "random")
_life = operator.attrgetter("birth", "death", "release", "category", "owner", "parameter")


def between(low: Trace, high: Trace, microbatch_size: int) -> Trace | None:
    """Return the trace of another microbatch size, from two of one program; None where they are not of one.

    Args:
        low: Of fewer samples in a microbatch than `high`.
        microbatch_size: Samples of the wanted step's microbatch; `batch_size` is then that of as many microbatches
            as `high` has.
    """
    first, last = low.microbatch_size, high.microbatch_size
    if not is_one_program(low, high) or any(operator_class(op.name) == RECURRENT for op in low.ops):
        return None
    line = _Line(first, last, microbatch_size)
    try:
        return line.trace(low, high)
    except _NotWholeError:
        return None


def is_one_program(one: Trace, other: Trace) -> bool:
    """Tell whether two steps run the same operators, with storages that live as long."""
    return (
        one.precision == other.precision
        and one.microbatches == other.microbatches
        and one.calls == other.calls
        and one.modules == other.modules
        and one.parameters == other.parameters
        and one.saves == other.saves
        and len(one.ops) == len(other.ops)
        and all(map(operator.eq, map(_op_key, one.ops), map(_op_key, other.ops)))
        and len(one.storages) == len(other.storages)
        and all(map(operator.eq, map(_life, one.storages), map(_life, other.storages)))
    )


def of_samples(trace: Trace, batch_size: int) -> Trace:
    """Return a step of two microbatches that stands for one of more samples: as many microbatches as they need."""
    count = -(-batch_size // trace.microbatch_size)
    return replace(trace, batch_size=batch_size, scale_microbatches=count)


class _NotWholeError(Exception):
    """A number would not be whole, or two texts differ."""


class _Line:
    """The straight line through the numbers of two sizes, at a third."""

    def __init__(self, low: int, high: int, at: int) -> None:
        self.low, self.high, self.at = low, high, at

    def trace(self, low: Trace, high: Trace) -> Trace:
        signatures: list[str] = []
        works: list[Work] = []
        known: dict[tuple[int, int], int] = {}
        ops = []
        for a, b in zip(low.ops, high.ops, strict=True):
            pair = a.signature, b.signature
            if pair not in known:
                known[pair] = len(signatures)
                signatures.append(self.text(low.signatures[a.signature], high.signatures[b.signature]))
                works.append(self.work(low.works[a.signature], high.works[b.signature]))
            ops.append(replace(a, signature=known[pair]))
        return replace(
            low,
            ops=ops,
            storages=[
                a if a.nbytes == b.nbytes else replace(a, nbytes=self.whole(a.nbytes, b.nbytes), shape=self.shape(a, b))
                for a, b in zip(low.storages, high.storages, strict=True)
            ],
            signatures=signatures,
            works=works,
            batch_size=self.at * high.microbatches,
            microbatch_size=self.at,
            scale_microbatches=high.microbatches,
            notes=high.notes,
            slack=max(low.slack, high.slack),
        )

    def shape(self, low: Storage, high: Storage) -> tuple[int, ...]:
        """Return the shape of a storage, () where it is not on the line."""
        try:
            return tuple(self.whole(a, b) for a, b in zip(low.shape, high.shape, strict=True))
        except (_NotWholeError, ValueError):
            return ()

    def whole(self, low: int, high: int) -> int:
        steps, rest = divmod((high - low) * (self.at - self.low), self.high - self.low)
        if rest:
            raise _NotWholeError
        return low + steps

    def work(self, low: Work, high: Work) -> Work:
        flops = self.whole(low.flops, high.flops)
        read_bytes, write_bytes = (
            self.whole(low.read_bytes, high.read_bytes),
            self.whole(low.write_bytes, high.write_bytes),
        )
        return Work(flops, read_bytes, write_bytes, high.dtype, high.kernel)

    def text(self, low: str, high: str) -> str:
        if low == high:
            return low
        return json.dumps(self.value(json.loads(low), json.loads(high)), separators=(",", ":"))

    def value(self, low: Any, high: Any) -> Any:
        if low == high:
            return low
        if isinstance(low, list) and isinstance(high, list) and len(low) == len(high):
            return [self.value(a, b) for a, b in zip(low, high, strict=True)]
        if isinstance(low, dict) and isinstance(high, dict) and low.keys() == high.keys():
            return {name: self.value(low[name], high[name]) for name in low}
        if type(low) is int and type(high) is int:
            return self.whole(low, high)
        if isinstance(low, float | int) and isinstance(high, float | int) and type(low) is not bool:
            return low + (high - low) * (self.at - self.low) / (self.high - self.low)  # a factor, which costs nothing
        raise _NotWholeError

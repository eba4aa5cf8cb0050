"""Collectives in a trace: what ranks send one another, by the names of PyTorch's operators, and who waits for it.

On a GPU they run on one communicator, one after the other, beside the computation:

1. A gather is waited for where its parameters are copied out.
2. A reduction of shards is waited for where the next one's gradients are copied in, and all before the update.
3. Sums of gradients (`DistributedDataParallel`) are waited for before the update; small ones, of losses and norms, at
   once.

On a CPU each is waited for at once.
"""

from __future__ import annotations

import json
from typing import NamedTuple

GATHER, SHARDS_OUT = "c10d._allgather_base_.default", "fsdp.split_with_sizes_copy.default"
SHARDS_IN, SCATTER = "fsdp.chunk_cat.default", "c10d._reduce_scatter_base_.default"
REDUCE, BROADCAST = "c10d.allreduce_.default", "c10d.broadcast_.default"
_SENT_SHARE = {GATHER: 1.0, SCATTER: 1.0, REDUCE: 2.0, BROADCAST: 1.0, "_c10d_functional.all_reduce.default": 2.0}
"""What each rank of N sends, as a multiple of B·(N−1)/N of B bytes: ring algorithms."""
SUM, RING, BUBBLE = "memfit.sum", "memfit.ring", "memfit.bubble"
"""Operators put into a trace on paper, for which ranks that share a model wait at once: sums of activations, keys and
values that go round, and a pipeline that fills and drains."""
_WAITED_SHARE = {SUM: 2.0, RING: 1.0}
SMALL_BYTES = 4096
"""Sums up to this size are of losses and norms, which the host reads."""


class Collective(NamedTuple):
    """A collective call.

    Attributes:
        nbytes: Bytes of the whole that is gathered, reduced, or goes round.
        ranks: Ranks that take part.
    """

    name: str
    nbytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """The bytes that each rank sends."""
        share = _WAITED_SHARE.get(self.name) or _SENT_SHARE[self.name]
        return share * self.nbytes * (self.ranks - 1) / self.ranks


def collective_text(name: str, nbytes: int, ranks: int) -> str:
    """Return the signature of a collective."""
    return json.dumps({"op": name, "args": [nbytes, ranks]}, separators=(",", ":"))


def is_collective(name: str) -> bool:
    """Tell whether an operator sends."""
    return name in _SENT_SHARE


def collective(signature: str) -> Collective | None:
    """Return the collective of a signature; None for other operators."""
    if not signature.startswith(('{"op":"c10d.', '{"op":"_c10d_functional.')):
        return None
    body = json.loads(signature)
    if body["op"] not in _SENT_SHARE or len(body.get("args", ())) != 2:
        return None
    return Collective(body["op"], *body["args"])


class Copy(NamedTuple):
    """A copy that was put into a trace on paper.

    Attributes:
        nbytes: Bytes that are copied.
        padded_bytes: Bytes of which a CPU's kernel makes padded copies first.
    """

    nbytes: int
    padded_bytes: int


def copy_on_paper(signature: str) -> Copy | None:
    """Return the copy of a signature that was put in on paper; None for other operators, and for captured ones."""
    if not signature.startswith(('{"op":"' + SHARDS_OUT, '{"op":"' + SHARDS_IN)):
        return None
    body = json.loads(signature)
    args = body.get("args", ())
    return Copy(args[0], body.get("padded", 0)) if len(args) == 1 and isinstance(args[0], int) else None


class Share(NamedTuple):
    """One rank's share of an operator, put into a trace on paper.

    Attributes:
        whole: The signature of the whole operator.
        ranks: Ranks that share it.
    """

    whole: str
    ranks: int


_SHARE = '"kwargs":{"share_of":'


def share_text(name: str, share: Share) -> str:
    """Return the signature of a share."""
    kwargs = {"share_of": share.whole, "ranks": share.ranks}
    return json.dumps({"op": name, "kwargs": kwargs}, separators=(",", ":"))


def share_on_paper(signature: str) -> Share | None:
    """Return the share of a signature that was put in on paper; None for other operators."""
    if _SHARE not in signature:
        return None
    kwargs = json.loads(signature)["kwargs"]
    return Share(kwargs["share_of"], kwargs["ranks"])


def waited(signature: str) -> Collective | None:
    """Return the collective of a signature that was put in on paper, on the critical path; None for others."""
    if not signature.startswith(tuple(f'{{"op":"{name}"' for name in _WAITED_SHARE)) or _SHARE in signature:
        return None
    body = json.loads(signature)
    return Collective(body["op"], *body["args"])


def is_bubble(signature: str) -> bool:
    """Tell whether a signature is that of a pipeline that fills and drains."""
    return signature.startswith('{"op":"' + BUBBLE)


def is_unmeasurable(signature: str) -> bool:
    """Tell whether an operator can't be measured by itself: it takes other ranks, or was put in on paper."""
    on_paper = any(of(signature) is not None for of in (collective, copy_on_paper, share_on_paper, waited))
    return on_paper or is_bubble(signature)


class Communicator:
    """The times of collectives on a communicator that runs beside the computation."""

    def __init__(self) -> None:
        self._free = 0.0
        self._gathers: list[float] = []
        self._reduced = 0.0

    def send(self, name: str, seconds: float, now: float) -> None:
        """Begin a collective as soon as those before it are through."""
        self._free = max(self._free, now) + seconds
        if name == GATHER:
            self._gathers.append(self._free)
        else:
            self._reduced = self._free

    def wait_seconds(self, name: str, now: float, *, is_update: bool) -> float:
        """Return how long an operator waits for what it needs."""
        if is_update:
            return max(0.0, self._free - now)
        if name == SHARDS_OUT and self._gathers:
            return max(0.0, self._gathers.pop(0) - now)
        return max(0.0, self._reduced - now) if name == SHARDS_IN else 0.0

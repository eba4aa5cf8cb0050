"""Operators of which a rank runs a share."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memfit.ir.collectives import Share, share_text
from memfit.ir.trace import Trace, Work


def with_shares(trace: Trace, positions: Iterable[int], ranks: int) -> Trace:
    """Return a step in which some operators do one rank's share of their work, to predict its time."""
    ops, signatures, works = list(trace.ops), list(trace.signatures), list(trace.works)
    of_share: dict[int, int] = {}
    for index in positions:
        op = ops[index]
        if op.signature not in of_share:
            of_share[op.signature] = len(signatures)
            signatures.append(share_text(op.name, Share(signatures[op.signature], ranks)))
            works.append(_share(works[op.signature], ranks))
        ops[index] = replace(op, signature=of_share[op.signature])
    return replace(trace, ops=ops, signatures=signatures, works=works)


def _share(work: Work, ranks: int) -> Work:
    flops, read_bytes, write_bytes = (-(-n // ranks) for n in (work.flops, work.read_bytes, work.write_bytes))
    return Work(flops, read_bytes, write_bytes, work.dtype, work.kernel)

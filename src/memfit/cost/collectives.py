"""Costs of collectives: latency, and bytes over the link that their ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from memfit.ir.collectives import COPY_IN, COPY_OUT, Collective, collective
from memfit.ir.operator_costs import CostTable, OpCost
from memfit.ir.trace import Trace


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks send over.

    Attributes:
        bytes_per_second: What a rank sends in one direction, while all do (> 0).
        latency_seconds: Of one message to the next rank (≥ 0).
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, sent: Collective) -> float:
        """Return the time of a collective by ring algorithms: N − 1 messages, twice as many for a sum."""
        rounds = (sent.ranks - 1) * (2 if sent.sent_bytes > sent.nbytes else 1)
        return rounds * self.latency_seconds + sent.sent_bytes / self.bytes_per_second


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of some ranks.

    Attributes:
        within: Of the ranks of one node.
        copy_bytes_per_second: At which a rank copies parameters out of what it gathered, and gradients into one buffer.
        between: Of the ranks of different nodes; None for one node.
        ranks_per_node: Ranks of one node (> 0), consecutive ones; 0 for all.
    """

    within: Link
    copy_bytes_per_second: float
    between: Link | None = None
    ranks_per_node: int = 0

    def of(self, ranks: int, *, spread: bool = False) -> Link:
        """Return the link that limits some ranks: consecutive ones, or ones `spread` over all nodes."""
        if self.between is None or not (spread or ranks > (self.ranks_per_node or ranks)):
            return self.within
        return self.between


def with_collectives(costs: CostTable, traces: Iterable[Trace], links: Links) -> CostTable:
    """Return costs with those of what ranks send, and of copies that were put in on paper."""
    ops = dict(costs.ops)
    for trace in traces:
        replicas = trace.sharding.replicas if trace.sharding else 1
        for text in trace.signatures:
            if (sent := collective(text)) is not None:
                spread = replicas > 1 and sent.ranks == replicas
                ops[text] = OpCost(links.of(sent.ranks, spread=spread).seconds(sent), 0, False)
            elif text not in ops and (nbytes := _copied_bytes(text)):
                ops[text] = OpCost(2 * nbytes / links.copy_bytes_per_second, 0, False)
    return msgspec.structs.replace(costs, ops=ops)


def _copied_bytes(text: str) -> int:
    """Return the bytes that an operator copies which was put in on paper; 0 for others."""
    if not text.startswith(('{"op":"' + COPY_OUT, '{"op":"' + COPY_IN)):
        return 0
    args = json.loads(text).get("args", ())
    return args[0] if len(args) == 1 and isinstance(args[0], int) else 0

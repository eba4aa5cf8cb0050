"""Costs of collectives: latency, and bytes over the link that their ranks share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memfit.ir.collectives import Collective, collective, copy_on_paper, share_on_paper, waited
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
        pads: Whether gradients are padded in copies before they are put into one buffer, as a CPU's kernel does.
    """

    within: Link
    copy_bytes_per_second: float
    between: Link | None = None
    ranks_per_node: int = 0
    pads: bool = False

    def of(self, ranks: int, *, spread: bool = False) -> Link:
        """Return the link that limits some ranks: consecutive ones, or ones `spread` over all nodes."""
        if self.between is None or not (spread or ranks > (self.ranks_per_node or ranks)):
            return self.within
        return self.between


def with_collectives(costs: CostTable, traces: Iterable[Trace], links: Links) -> CostTable:
    """Return costs with those of collectives, and of copies and shares that were put in on paper."""
    ops = dict(costs.ops)
    for trace in traces:
        replicas = trace.sharding.replicas if trace.sharding else 1
        for text in trace.signatures:
            if (sent := collective(text)) is not None:
                spread = replicas > 1 and sent.ranks == replicas
                ops[text] = OpCost(links.of(sent.ranks, spread=spread).seconds(sent), 0, False)
            elif (copied := copy_on_paper(text)) is not None:
                padded_bytes = copied.padded_bytes if links.pads else 0
                ops[text] = OpCost(2 * copied.nbytes / links.copy_bytes_per_second, padded_bytes, False)
            elif (waiting := waited(text)) is not None:
                ops[text] = OpCost(links.of(waiting.ranks).seconds(waiting), 0, False)
            elif text not in ops and (share := share_on_paper(text)) is not None:
                whole = ops.get(share.whole) or costs.of(share.whole)
                ops[text] = OpCost(whole.seconds / share.ranks, whole.workspace_bytes // share.ranks, whole.measured)
    return msgspec.structs.replace(costs, ops=ops)

"""Where costs come from that a clock tells: measured on this machine, or fixed, so that no clock is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from memfit.ir.collectives import Collective


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


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the place of measured ones. What calls allocate inside is measured as ever: no clock is in that.

    Attributes:
        name: Its costs are cached under this name.
        seconds: The time of a call, by its signature.
        dispatch_seconds, checkpoint_seconds, selective_op_seconds: As in a `CostTable`.
        links: The links among processes of this machine.
    """

    name: str
    seconds: Callable[[str], float]
    dispatch_seconds: float
    checkpoint_seconds: float
    selective_op_seconds: float
    links: Links


_fixed: CostSource | None = None


def fixed_source() -> CostSource | None:
    """Return the source of costs within `costs_from`; None where costs are measured."""
    return _fixed


@contextlib.contextmanager
def costs_from(source: CostSource) -> Iterator[None]:
    """Take the costs of this machine's CPU from a source within the context, and time no operator."""
    global _fixed
    before, _fixed = _fixed, source
    try:
        yield
    finally:
        _fixed = before

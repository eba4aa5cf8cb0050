"""Where costs come from that a clock tells: measured on this machine, or fixed, so that no clock is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from memfit.cost.communication import Links


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

"""Costs of operators that no clock tells: what a call works on, over rates that are the same on every machine.

Tests of plans and predictions ask what follows from costs, and not how long an operator takes on a busy machine. What
each call allocates inside is measured as always: that has no clock in it. `tests/cost` measures the times too.
"""

from __future__ import annotations

import contextlib
import math

import msgspec

from memfit.cost import CostSource, Link, Links, costs_from
from memfit.ir import ATTENTION, CONVOLUTIONS, MATRIX, RECURRENT, VIEWS, arguments, operator_class

FLOPS_PER_SECOND, BYTES_PER_SECOND = 5e10, 8e9
CALL_SECONDS, VIEW_SECONDS = 2e-6, 1e-6
DISPATCH_SECONDS, CHECKPOINT_SECONDS, SELECTIVE_OP_SECONDS = 5e-6, 5e-5, 5e-6
LINKS = Links(within=Link(bytes_per_second=1e9, latency_seconds=1e-4), copy_bytes_per_second=5e9, pads=True)


def seconds_of(signature: str) -> float:
    """Return what a call takes, by its signature: the longer of its arithmetic and its traffic, and a call's own.

    The arithmetic is about that of the operators' definitions; what is asked of it is to grow as it does.
    """
    name = str(msgspec.json.decode(signature)["op"])
    kind, tensors = operator_class(name), arguments(signature).tensors
    if kind == VIEWS:
        return VIEW_SECONDS
    flops = 0.0
    if kind in (MATRIX, CONVOLUTIONS, RECURRENT, ATTENTION) and len(tensors) > 1:
        wide = [tensor for tensor in tensors if len(tensor.shape) > 1]
        sizes = sorted((tensor.elements for tensor in wide), reverse=True)[:2]
        inner = max((min(tensor.shape) for tensor in wide), default=1) if kind == CONVOLUTIONS else 1
        shared = max((tensor.shape[-2] for tensor in wide), default=1)
        flops = 2.0 * math.prod(sizes) / max(1, inner if kind == CONVOLUTIONS else shared)
        flops *= 2 if "backward" in name else 1
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return max(flops / FLOPS_PER_SECOND, 1.5 * nbytes / BYTES_PER_SECOND) + CALL_SECONDS


SOURCE = CostSource(
    name="fixed",
    seconds=seconds_of,
    dispatch_seconds=DISPATCH_SECONDS,
    checkpoint_seconds=CHECKPOINT_SECONDS,
    selective_op_seconds=SELECTIVE_OP_SECONDS,
    links=LINKS,
)


def fixed_costs() -> contextlib.AbstractContextManager[None]:
    """Take these costs in the place of those that are timed, of operators and of links between processes."""
    return costs_from(SOURCE)

"""Costs of operators on a device, seconds and workspace bytes, and of the kernels that a compiler fuses from them."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.ir.codec import Shown
from memfit.ir.operators import is_kernel, members_of, reused_bytes_of
from memfit.ir.trace import Op, Trace, enclosing


def unfused(trace: Trace) -> Trace:
    """Return a trace with the operators of its kernels one by one, for their costs; its storages are of no use then."""
    if not any(map(is_kernel, trace.signatures)):
        return trace
    index = {text: number for number, text in enumerate(trace.signatures)}
    ops: list[Op] = []
    for op in trace.ops:
        text = trace.signatures[op.signature]
        if not is_kernel(text):
            ops.append(op)
            continue
        for member in members_of(text):
            ops.append(replace(op, name=str(json.loads(member)["op"]), signature=index[member]))
    used = [text for text in trace.signatures if not is_kernel(text)]
    number = {index[text]: position for position, text in enumerate(used)}
    return replace(
        trace,
        ops=[replace(op, signature=number[op.signature]) for op in ops],
        signatures=used,
        works=[trace.works[index[text]] for text in used],
    )


class OpCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of one operator call.

    Attributes:
        seconds: Shortest time of several calls.
        workspace_bytes: Peak of the bytes that it allocates beyond its outputs.
        measured: Whether both were measured on the device; else they are estimates.
        coarse: Whether the time is that of one or two calls, since it was a small part of its step.
    """

    seconds: float
    workspace_bytes: int
    measured: bool
    coarse: bool = False


class CostTable(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of the operators of some traces, by signature.

    Attributes:
        dispatch_seconds: Overhead of each operator of a step: Python, autograd, modules.
        checkpoint_seconds: Overhead of one recomputation beyond the operators that run again.
        selective_op_seconds: Overhead of each operator inside a selective region, once in the forward pass and once in
            the recomputation.
        peak_error: Relative distance of the upper end of a predicted peak's interval.
        step_error: Relative half-width of a predicted step time's interval.
        resident_workspace_bytes: Workspaces that libraries keep in the allocator for the whole program.
        link_bytes_per_second: Bandwidth between host and device, in one direction; 0 where there is no link.
    """

    schema: str = "memfit.costs/2"
    device: str
    torch_version: str
    threads: int
    ops: dict[str, OpCost]
    dispatch_seconds: float
    checkpoint_seconds: float
    selective_op_seconds: float
    peak_error: float
    step_error: float = 0.2
    resident_workspace_bytes: int = 0
    link_bytes_per_second: float = 0.0
    notes: list[str] = []

    def of(self, signature: str) -> OpCost:
        """Return the cost of a signature; of an unknown one 0, not measured."""
        if not is_kernel(signature):
            return self.ops.get(signature, _UNKNOWN)
        members = members_of(signature)  # of which the slowest takes the kernel's time
        costs = [self.of(member) for member in members]
        # Generated code has no workspace, a library's has its own; bytes written in place count as one below zero.
        is_library = len(members) == 1 and members[0].startswith(_LIBRARY)
        workspace_bytes = costs[0].workspace_bytes if is_library else 0
        return OpCost(
            max((cost.seconds for cost in costs), default=0.0),
            workspace_bytes - reused_bytes_of(signature),
            all(cost.measured for cost in costs),
        )

    def seconds_of(self, signature: str) -> float:
        """Return an operator's share of a step's time, dispatch included: compiled code launches kernels by itself."""
        dispatch_seconds = 0.0 if is_kernel(signature) else self.dispatch_seconds
        return self.of(signature).seconds + dispatch_seconds

    def captured_overheads(self, trace: Trace) -> dict[int, float]:
        """Return the overhead of a captured step's own recomputations beyond their operators, by their first operator.

        A compiled graph computes again by operators of its own, with no call around them that costs any.
        """
        selective, found = set(trace.selective), {}
        for run in trace.recomputed_runs:
            if is_kernel(trace.signatures[trace.ops[run[0]].signature]):
                continue
            seconds = self.checkpoint_seconds
            modules = {trace.fqn_of(trace.ops[index].call) for index in run} if selective else set()
            if any(not selective.isdisjoint(enclosing(fqn)) for fqn in modules):
                seconds += self.selective_op_seconds * len(run)
            found[run[0]] = seconds
        return found

    def op_seconds(self, trace: Trace) -> npt.NDArray[np.float64]:
        """Return the seconds of each operator of a trace."""
        return np.array([self.seconds_of(text) for text in trace.signatures], np.float64)[trace.op_signatures]

    def op_workspaces(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Return the bytes that each operator of a trace allocates beyond its outputs."""
        return np.array([self.of(text).workspace_bytes for text in trace.signatures], np.int64)[trace.op_signatures]


_UNKNOWN = OpCost(0.0, 0, False)
_LIBRARY = '{"op":"aten.'

"""What operators cost on a device: seconds and the bytes they use inside."""

from __future__ import annotations

import msgspec

from memfit.ir.display import Shown


class OpCost(msgspec.Struct, frozen=True, array_like=True):
    """One operator call.

    Attributes:
        seconds: Least time of several calls.
        workspace_bytes: Peak of the bytes it allocates inside, beyond its outputs.
        measured: Whether both were measured on the device, or are estimates.
        coarse: The time is that of one or two calls, since they took little of the step that they were measured for.
    """

    seconds: float
    workspace_bytes: int
    measured: bool
    coarse: bool = False


class CostTable(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of the operators of some traces, by signature.

    Attributes:
        dispatch_seconds: What each operator of a step costs beyond itself: Python, autograd, modules.
        checkpoint_seconds: What one checkpointed call costs beyond the operators it runs again.
        selective_op_seconds: What each operator inside a selective region costs beyond itself, once
            in the forward pass and once in the recomputation.
        peak_error: Share of a predicted peak by which the upper end of its interval lies above it.
        step_error: The same around a predicted step time.
        resident_workspace_bytes: What libraries keep in the allocator for as long as the program runs.
        link_bytes_per_second: One direction between host and device; 0 where there is no link.
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

    def of(self, signature: str) -> OpCost:
        """Return the cost of a signature; unknown ones cost nothing and are not measured."""
        return self.ops.get(signature, _UNKNOWN)

    def seconds_of(self, signature: str) -> float:
        """Return what an operator adds to a step's time, dispatch included."""
        return self.of(signature).seconds + self.dispatch_seconds


_UNKNOWN = OpCost(0.0, 0, False)

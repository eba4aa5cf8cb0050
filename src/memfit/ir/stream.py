"""The time of a sequence of kernels that the host issues and the device runs behind it."""

from __future__ import annotations

from collections.abc import Iterable


def stream_seconds(kernel_seconds: Iterable[float], dispatch_seconds: float) -> float:
    """Return when the last kernel of one stream ends.

    The host issues an operator every `dispatch_seconds` and waits for nothing; a kernel starts when it
    is issued and the one before it is done. Operators without a kernel take 0 seconds on the device.
    A step is bound by the host where its kernels are shorter than their dispatch, and by the device
    elsewhere; what the device falls behind, later short kernels hide.

    `CostTable` adds up `max(kernel, dispatch)` instead, since plans need costs that add. That is more where
    long kernels hide the dispatch of short ones, and never less by more than one dispatch.

    Args:
        kernel_seconds: Of each operator on the device, in order.
        dispatch_seconds: Of each operator on the host.
    """
    issued = done = 0.0
    for seconds in kernel_seconds:
        issued += dispatch_seconds
        done = max(done, issued) + seconds
    return done

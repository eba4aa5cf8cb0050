"""How long a compiled step's code takes to make, on a CPU where none is kept from an earlier run.

Measured on two cores of an AMD EPYC with torch 2.13 and g++ 12, in CPU seconds with one process that compiles, for six
steps: perceptrons of 2 and 8 blocks, byte-level Transformers of 1 and 4 layers, a GPT-2 of 4 layers and a ResNet. They
took 16 to 55 s, and these constants give each of them to within 16 %. No benchmark holds that yet, and another machine
takes other times: it is an estimate to be said, and nothing is chosen by it.
"""

from __future__ import annotations

from memfit.ir.kernels import is_kernel
from memfit.ir.trace import Trace

_HEADER_SECONDS = 10.0
"""PyTorch's headers, compiled once before the kernels."""
_OPERATOR_SECONDS = 0.016
"""Tracing, partitioning and lowering, in Python, for each operator of the step."""
_KERNEL_SECONDS = 0.3
"""The C++ compiler, for each kernel."""


def kernels_of(trace: Trace) -> int:
    """Return how many kernels code is made of, in the trace of a compiled step."""
    return sum(map(is_kernel, trace.signatures))


def code_seconds(trace: Trace, processes: int) -> float:
    """Return about how long the code of a compiled step takes to make on a CPU.

    Args:
        trace: The step, captured under the plan.
        processes: Kernels that are compiled at a time.
    """
    return _HEADER_SECONDS + _OPERATOR_SECONDS * len(trace.ops) + _KERNEL_SECONDS * kernels_of(trace) / processes

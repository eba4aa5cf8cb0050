"""What is outside of the allocator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.cost.outside import CUDNN_KERNELS_BYTES, KERNELS_BYTES, kernels_bytes
from memfit.ir.trace import Op, Trace
from tests.models import plain_trace


def trace_of(*names: str) -> Trace:
    ops = [Op(name, -1, "forward", 0, 0, (), False) for name in names]
    return replace(plain_trace("transformer"), ops=ops)


@pytest.mark.parametrize("name", ["aten.convolution.default", "aten.cudnn_convolution.default"])
def test_only_steps_that_convolve_need_the_kernels_of_cudnn(name: str) -> None:
    assert kernels_bytes(trace_of("aten.mm.default", "aten.add.Tensor")) == KERNELS_BYTES
    assert kernels_bytes(trace_of("aten.mm.default", name)) == KERNELS_BYTES + CUDNN_KERNELS_BYTES
    assert kernels_bytes(trace_of(name.replace("convolution", "convolution_backward"))) > KERNELS_BYTES

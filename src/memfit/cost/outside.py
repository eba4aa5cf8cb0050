"""What a process holds on a GPU outside of the allocator: the driver's context and the kernels that are loaded.

A card's `context_bytes` is of processes that load a kernel when it is first launched. That is how CUDA does it since
11.7 where `CUDA_MODULE_LOADING=LAZY` is set before the driver starts, and by default since 12.2 (NVIDIA, *CUDA
Programming Guide*, "Lazy Loading"). PyTorch sets it since 1.13 when it starts CUDA, which is too late where a script
has asked `torch.cuda.is_available()` before (pytorch/pytorch issue 113326): with drivers older than CUDA 12.2 such a
process holds every kernel of its libraries. Neither is known of a step, so that this is the upper end.
"""

from __future__ import annotations

from memfit.ir.operator_classes import CONVOLUTIONS, operator_class
from memfit.ir.trace import Trace

KERNELS_BYTES = 1024 * 2**20
"""Every kernel of PyTorch and cuBLAS: 921 MiB beyond the card's `context_bytes` on an A100 (GPUMemNet's smallest
multilayer perceptrons: 1443 MiB, of which 22 MiB are reserved), 993 MiB on a V100 (transformers: 1343 MiB after a
tensor of one element)."""
CUDNN_KERNELS_BYTES = 283 * 2**20
"""Those of cuDNN, on an A100: 13 of timm's models at batch 8 hold 1704 MiB (the median; 1569 to 1790) beyond their
predicted reserved bytes, perceptrons on the same machine 1421 MiB (GPUMemNet, fake_tensor.xlsx, mlp_data_step1.csv)."""


def kernels_bytes(trace: Trace) -> int:
    """Return the bytes of all kernels of the libraries that a step needs, most of which it never launches."""
    convolves = any(operator_class(op.name) == CONVOLUTIONS for op in trace.ops)
    return KERNELS_BYTES + (CUDNN_KERNELS_BYTES if convolves else 0)

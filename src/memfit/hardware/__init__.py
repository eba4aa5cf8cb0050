"""Devices: the machine and its accelerators, the catalogue of GPUs, measured peaks, and a GPU's program without a GPU.

`accelerators` reads and sets the memory of a device that is here, and `heap` the allocator of the CPU. `shim` and
`process` run a program on fake CUDA tensors, in another process, for a GPU that is not here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

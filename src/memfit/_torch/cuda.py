"""Queries of GPUs, and the record of PyTorch's allocator."""

from typing import Any

import torch


def take_snapshot(device: torch.device) -> Any:
    """Return the blocks of PyTorch's allocator on a GPU, and its recorded history."""
    return torch.cuda.memory._snapshot(device)


def is_initialized(kind: str) -> bool:
    """Tell whether this process has initialized a kind of accelerator, and so has random generators there."""
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized"):
        return bool(module.is_initialized())
    return bool(getattr(module, "_initialized", False))


def answer_for_one_device() -> None:
    """Make PyTorch's own code and Triton's drivers see one GPU, until the process ends."""
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # looked up by Triton's drivers at import

"""Host memory that a training does not touch, which a checkpoint is written from while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.hardware.accelerators import pins_memory, synchronize


class HostBuffers:
    """Copies of tensors in host memory, pinned for accelerators that copy faster to it.

    Memory is taken at the first copy, and used again for tensors of the same name, shape and dtype.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copied(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Return contiguous copies of the tensors of some files, which last until the next call."""
        before, self._buffers = self._buffers, {}
        for file, tensors in files.items():
            for key, tensor in tensors.items():
                buffer = before.pop((file, key), None)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    is_pinned = pins_memory(tensor.device.type)
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._buffers[file, key] = buffer.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensors in files.values() for tensor in tensors.values()}:
            synchronize(device)
        return {file: {key: self._buffers[file, key] for key in tensors} for file, tensors in files.items()}

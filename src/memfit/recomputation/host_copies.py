"""Activation offload as a lever: the tensors that a region keeps for its recomputation wait in host memory.

On a GPU, copies run on two streams beside the computation, one to pinned host memory and one back. On the CPU they are
plain copies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memfit import workload
from memfit._torch import version_of
from memfit.ir import LEAST_BYTES


class ChangedError(Exception):
    """A tensor was changed in place while it was copied to the host."""


def is_worth_moving(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is large enough to offload, and covers its storage."""
    return workload.transfers.covers_storage(tensor) and tensor.numel() * tensor.itemsize >= LEAST_BYTES


class _Link:
    """The streams between a device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if self.module is not None:
            self.out, self.back = self.module.Stream(device), self.module.Stream(device)

    def copy(self, operator: Any, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy on a stream, after the computation so far; return the event of the copy's end."""
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            operator(target, source)
            return stream.record_event()

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Make the computation's stream wait for an event."""
        if self.module is not None:
            self.module.current_stream(self.device).wait_event(event)
        workload.transfers.wait(tensor)


_link = functools.cache(_Link)


class HostCopy:
    """A tensor's copy in host memory, which begins at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._source: torch.Tensor | None = tensor
        self._version = version_of(tensor)
        self._link = _link(tensor.device)
        self._back: tuple[torch.Tensor, Any] | None = None
        self._event: Any = None
        self._is_changed = False
        with torch.no_grad():
            if self._link.module is None:
                self._host = torch.empty_like(tensor)
                workload.transfers.copy_out(self._host, tensor)
            else:
                self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self._event = self._link.copy(workload.transfers.copy_out, self._link.out, self._host, tensor)

    def land(self) -> None:
        """Make the computation wait for the copy to the host, and release the tensor.

        Its memory is then free for later operators, at the same place in every step.
        """
        if self._source is not None:
            self._link.wait(self._event, self._host)
            self._is_changed = version_of(self._source) != self._version
            self._source = None

    def prefetch(self) -> None:
        """Begin to copy the tensor back, unless that has begun; it is allocated on the computation's stream."""
        if self._back is None:
            with torch.no_grad():
                tensor = torch.empty_like(self._host, device=self._link.device)
                event = None
                if self._link.module is None:
                    workload.transfers.copy_in(tensor, self._host)
                else:
                    event = self._link.copy(workload.transfers.copy_in, self._link.back, tensor, self._host)
            self._back = tensor, event

    def take(self) -> torch.Tensor:
        """Return the tensor on its device, held by the caller only, after the copy back.

        Raises:
            ChangedError: The tensor was changed in place while it was copied to the host.
        """
        self.land()
        if self._is_changed:
            raise ChangedError
        self.prefetch()
        tensor, event = self._back  # type: ignore[misc]
        self._back = None
        with torch.no_grad():
            self._link.wait(event, tensor)
        return tensor

    def __del__(self) -> None:
        if self._back is not None and self._link.module is not None:
            # Never taken: its memory must not be given away while it is written to.
            self._link.module.current_stream(self._link.device).wait_event(self._back[1])

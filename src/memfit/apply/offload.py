"""Activation offload as a lever: what a region keeps for its recomputation waits in host memory.

Copies run on streams of their own, one to the host and one from it, beside the computation; host memory is pinned.
A tensor that is on its way to the host is held until `Sending.land`, where the computation's stream waits for it:
so its memory is free for what comes later, at the same place in every step. What comes back is allocated on the
computation's stream, which waits for the copy before it is used. On the CPU both copies are plain ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memfit import transfers
from memfit.ir.offload import LEAST_BYTES


class ChangedError(Exception):
    """A tensor was changed in place while it was sent to the host."""


def is_worth_moving(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is large enough, and all there is of its storage."""
    return transfers.covers_storage(tensor) and tensor.numel() * tensor.itemsize >= LEAST_BYTES


class _Link:
    """The streams between a device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if self.module is not None:
            self.out, self.back = self.module.Stream(device), self.module.Stream(device)

    def copy(self, operator: Any, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy on a stream, after what the computation has done so far; return an event that comes when it is done."""
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            operator(target, source)
            return stream.record_event()

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Have the computation wait for an event."""
        if self.module is not None:
            self.module.current_stream(self.device).wait_event(event)
        transfers.wait(tensor)


@functools.cache
def _link(device: torch.device) -> _Link:
    return _Link(device)


class Away:
    """A tensor that waits in host memory.

    Args:
        tensor: The tensor; copying it begins.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._source: torch.Tensor | None = tensor
        self._version = tensor._version
        self._link = _link(tensor.device)
        self._back: tuple[torch.Tensor, Any] | None = None
        self._event: Any = None
        self._is_changed = False
        with torch.no_grad():
            if self._link.module is None:
                self._host = torch.empty_like(tensor)
                transfers.copy_out(self._host, tensor)
            else:
                self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self._event = self._link.copy(transfers.copy_out, self._link.out, self._host, tensor)

    def land(self) -> None:
        """Have the computation wait until the tensor is in host memory, and let go of it."""
        if self._source is not None:
            self._link.wait(self._event, self._host)
            self._is_changed = self._source._version != self._version
            self._source = None

    def prefetch(self) -> None:
        """Begin to copy it back, unless that has begun."""
        if self._back is None:
            with torch.no_grad():
                tensor = torch.empty_like(self._host, device=self._link.device)
                event = None
                if self._link.module is None:
                    transfers.copy_in(tensor, self._host)
                else:
                    event = self._link.copy(transfers.copy_in, self._link.back, tensor, self._host)
            self._back = tensor, event

    def take(self) -> torch.Tensor:
        """Return the tensor, on its device again; it is held by the caller only.

        Raises:
            ChangedError: It was changed in place on its way to the host.
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

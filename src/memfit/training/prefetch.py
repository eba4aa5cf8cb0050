"""Loads batches ahead in a thread, and copies them to the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from memfit.batch import map_tensors

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """A thread that calls a function repeatedly, a few items ahead of its consumer.

    Args:
        make: Returns the next item. An exception ends the thread, and is raised where that item is taken.
        depth: Most items made and not yet taken (> 0).
    """

    def __init__(self, make: Callable[[], T], depth: int) -> None:
        self._make = make
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="memfit-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Wait for the next item and return it; don't call it again after it raised."""
        item, error = self._made.get()
        self._room.release()
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def stop(self) -> None:
        """Wait for the item in progress, and end the thread."""
        self._is_stopping = True
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        while error is None:
            self._room.acquire()
            if self._is_stopping:
                return
            item = None
            try:
                item = self._make()
            except BaseException as e:
                error = e
            self._made.put((item, error))


def pinned(batch: Any) -> Any:
    """Return a batch in pinned memory, from which copies to a GPU overlap with its computation."""
    return map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; tensors already there are not copied."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)

"""The stream of a workload's batches, with a position that a checkpoint can hold."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.errors import CheckpointError, MemfitError, UsageError, WorkloadError
from memfit.workload import (
    Workload,
    bytes_tensor,
    generator_state,
    map_tensors,
    rng_preserved,
    rng_state,
    set_rng_state,
)


class BatchStream:
    """The batches of a workload, epoch after epoch, on the device of its parameters.

    The position is the batches' own `state_dict()`. Batches without one are iterated again from the epoch's beginning,
    under the random state of that moment, and used ones are skipped. That gives the same order for loaders that shuffle
    by PyTorch's, Python's or NumPy's global generators, or by a `generator` of the loader or of its sampler; other
    sources of randomness need a `state_dict()`.

    With `prefetch_batches`, a thread loads batches ahead while steps run; the position stays that of the next batch to
    return. The thread shares the global generators with the step, so batches must not draw from them, except the first
    of an iterator, when loaders shuffle. That one is loaded in the caller's thread, as is the second batch of all, to
    check whether it draws. When loading fails, position and random states are those before the batch.

    Args:
        workload: The workload; without `batches`, its one batch is an epoch.
        prefetch_batches: Number of batches to load ahead (≥ 0). Each must have tensors of its own.

    Attributes:
        epoch: Epoch of the next batch, unless it turns out to be over.
        used: Number of the epoch's batches returned.

    Raises:
        UsageError: `prefetch_batches` is negative, or the batches are a loader whose workers already load ahead.
    """

    def __init__(self, workload: Workload, prefetch_batches: int = 0) -> None:
        self._batches: Any = [workload.batch] if workload.batches is None else workload.batches
        self._device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
        if isinstance(prefetch_batches, bool) or not isinstance(prefetch_batches, int) or prefetch_batches < 0:
            raise UsageError(f"prefetch_batches={prefetch_batches!r} is not a whole number, 0 or above")
        if prefetch_batches and (workers := getattr(self._batches, "num_workers", 0)):
            raise UsageError(
                f"prefetch_batches={prefetch_batches}: Workload.batches has num_workers={workers}, so it loads batches"
                " ahead already. Set prefetch_batches=0"
            )
        methods = (getattr(self._batches, name, None) for name in ("state_dict", "load_state_dict"))
        self._is_stateful, self._prefetch_batches = all(map(callable, methods)), prefetch_batches
        self._is_safe_ahead = False
        self._ahead: Prefetcher | None = None
        self._iterator: Iterator[Any] | None = None
        self._made = 0
        self._own_before: Any = None
        self._own_after: tuple[Any] | None = None
        self._random_before: dict[str, Any] | None = None
        self._epoch_start: dict[str, Any] | None = None
        self._may_be_empty = False
        self.epoch = 0
        self.used = 0

    def next_batch(self, epochs: int | None) -> tuple[Any] | None:
        """Return the next batch, in a tuple, or None when that many epochs are over."""
        while epochs is None or self.epoch < epochs:
            self._own_before = self._own_state() if self._own_after is None else self._own_after[0]
            self._random_before = None
            try:
                batch, own = self._make_here() if self._ahead is None else self._ahead.take()
            except StopIteration:
                self._stop()
                if self.used == 0 and not self._may_be_empty:
                    raise WorkloadError(
                        f"Workload.batches gave no batch in epoch {self.epoch}: memfit iterates over it again in every"
                        " epoch. Give a list or a DataLoader, not a generator"
                    ) from None
                self.epoch += 0 if self.used == 0 else 1
                self.used, self._may_be_empty, self._iterator, self._own_after = 0, False, None, None
                continue
            self._own_after = (own,)
            self.used += 1
            self._may_be_empty = False
            return (on_device(batch, self._device),)
        return None

    def position(self) -> dict[str, Any]:
        """Return the position before the next batch."""
        own = self._own_state() if self._own_after is None else self._own_after[0]
        at_end = False
        if own is not None and self.used > 0:
            with contextlib.suppress(TypeError):  # batches without a length
                at_end = self.used == len(self._batches)
        inside = self.used > 0 and not at_end
        return {
            "epoch": self.epoch + at_end,
            "used": self.used if inside else 0,
            "own": own,
            "epoch_start": self._epoch_start if inside else self._random_state(),
        }

    def take_back(self) -> dict[str, Any]:
        """Return the position before the last returned batch, and restore the random states of that time.

        The stream itself goes on after that batch.
        """
        if self._random_before is not None:  # else it was loaded ahead, and drew nothing
            self._set_random_state(self._random_before)
        return {
            "epoch": self.epoch,
            "used": self.used - 1,
            "own": self._own_before,
            "epoch_start": self._epoch_start,
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Move to a position. The global generators stay as they are: set them afterwards."""
        if (position["own"] is not None) != self._is_stateful:
            has, had = ("has", "had none") if self._is_stateful else ("has no", "had one")
            raise CheckpointError(
                f"Workload.batches {has} state_dict(), and the checkpoint's {had}: give the checkpoint's batches"
            )
        self._stop()
        with rng_preserved():
            if position["own"] is None:  # iterate the epoch again, as it began
                self._set_random_state(position["epoch_start"])
                self._iterator, self._made = (iter(self._batches) if position["used"] else None), position["used"]
                for used in range(position["used"]):
                    try:
                        next(self._iterator)  # type: ignore[arg-type]
                    except StopIteration as e:
                        raise CheckpointError(
                            f"Workload.batches gave {used} batches in epoch {position['epoch']}, and the checkpoint"
                            f" used {position['used']}: give the checkpoint's batches"
                        ) from e
            else:
                try:
                    self._batches.load_state_dict(position["own"])
                except MemfitError:
                    raise
                except Exception as e:
                    raise CheckpointError(
                        f"Workload.batches could not continue at the checkpoint's position: {e!r}"
                    ) from e
                self._iterator, self._made = (iter(self._batches) if position["used"] else None), 0
        self.epoch, self.used = position["epoch"], position["used"]
        self._own_after = None if position["own"] is None else (position["own"],)
        self._epoch_start = position["epoch_start"]
        self._may_be_empty = self.used == 0

    def close(self) -> None:
        """Stop loading ahead, and set batches with a position to that of the next one."""
        if self._ahead is not None:
            self._stop()
            if self._own_after is not None and self._own_after[0] is not None:
                self._batches.load_state_dict(self._own_after[0])

    # Loading batches

    def _make_here(self) -> tuple[Any, Any]:
        """Load a batch now, and start loading the next ones in a thread where batches are prefetched."""
        before = self._random_before = self._random_state()
        try:
            if self._iterator is None:
                self._epoch_start = before
                self._iterator, self._made = iter(self._batches), 0
            item = next(self._iterator), self._own_state()
            if self._prefetch_batches and not self._is_safe_ahead and self._made:
                if rng_state() != before["global"]:
                    raise WorkloadError(
                        "Workload.batches draws from the global random generators. With"
                        f" prefetch_batches={self._prefetch_batches} its draws would mix with the step's: give it its"
                        " own generator, use DataLoader(num_workers=...), or set prefetch_batches=0"
                    )
                self._is_safe_ahead = True
        except StopIteration:
            raise
        except BaseException:
            self._set_random_state(before)
            raise
        self._made += 1
        if self._prefetch_batches and self._is_safe_ahead:
            self._ahead = Prefetcher(self._make_ahead, self._prefetch_batches)
        return item

    def _make_ahead(self) -> tuple[Any, Any]:
        assert self._iterator is not None
        batch, own = next(self._iterator), self._own_state()
        if self._device.type != "cpu":  # pinned: copies to a GPU then overlap with its computation
            batch = map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch)
        return batch, own

    def _own_state(self) -> Any:
        return copy.deepcopy(self._batches.state_dict()) if self._is_stateful else None

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _random_state(self) -> dict[str, Any]:
        return {"global": rng_state(), "own": [generator_state(g) for g in _generators(self._batches)]}

    def _set_random_state(self, state: dict[str, Any]) -> None:
        generators = _generators(self._batches)
        if len(generators) != len(state["own"]):
            raise CheckpointError(
                f"Workload.batches has {len(generators)} generators, and the checkpoint's batches had"
                f" {len(state['own'])}: give the checkpoint's batches"
            )
        for generator, own in zip(generators, state["own"], strict=True):
            generator.set_state(bytes_tensor(own))
        set_rng_state(state["global"])


def _generators(batches: Any) -> list[torch.Generator]:
    sampler, batch_sampler = (getattr(batches, name, None) for name in ("sampler", "batch_sampler"))
    owners = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    return list({id(g): g for g in generators}.values())


class Prefetcher:
    """A thread that calls `make` repeatedly, at most `depth` items ahead of its consumer.

    An exception ends the thread, and is raised where that item is taken.
    """

    def __init__(self, make: Callable[[], tuple[Any, Any]], depth: int) -> None:
        self._make = make
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="memfit-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[Any, Any]:
        """Wait for the next item and return it; don't call it again after it raised."""
        item: tuple[Any, Any]
        item, error = self._made.get()
        self._room.release()
        if error is not None:
            raise error
        return item

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


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; tensors already there are not copied."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)

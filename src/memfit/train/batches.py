"""The stream of a workload's batches, with a position that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memfit.errors import CheckpointError, MemfitError, WorkloadError
from memfit.rng import bytes_tensor, generator_state, rng_preserved, rng_state, set_rng_state
from memfit.workload import Workload


class BatchStream:
    """The batches of a workload, epoch after epoch.

    The position is what the batches' own `state_dict()` says. Batches without one are iterated again
    from the epoch's beginning, under the random state of that moment, and those that were used are
    skipped. That gives the same order for loaders that shuffle by PyTorch's, Python's or NumPy's
    global generators, or by a `generator` of the loader or of its sampler; other sources of
    randomness need a `state_dict()`.

    Args:
        workload: Whose batches; when it has none, its one batch is an epoch.

    Attributes:
        epoch: Of the next batch, unless the epoch turns out to be over.
        used: Batches of the epoch that were given.
    """

    def __init__(self, workload: Workload) -> None:
        self._batches: Any = [workload.batch] if workload.batches is None else workload.batches
        self._iterator: Iterator[Any] | None = None
        self._epoch_start: dict[str, Any] | None = None
        self._may_be_empty = False
        self.epoch = 0
        self.used = 0

    def next_batch(self, epochs: int | None) -> tuple[Any] | None:
        """Return the next batch, in a tuple, or None when that many epochs are over.

        Raises:
            WorkloadError: An epoch has no batches.
        """
        while epochs is None or self.epoch < epochs:
            if self._iterator is None:
                self._epoch_start = self._random_state()
                self._iterator = iter(self._batches)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            self.used += 1
            self._may_be_empty = False
            return (batch,)
        return None

    def position(self) -> dict[str, Any]:
        """Return where the stream is, before the next batch."""
        own = self._batches.state_dict() if self._is_stateful() else None
        at_end = own is not None and self.used > 0 and self.used == self._epoch_length()
        inside = self.used > 0 and not at_end
        return {
            "epoch": self.epoch + at_end,
            "used": self.used if inside else 0,
            "own": own,
            "epoch_start": self._epoch_start if inside else self._random_state(),
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Move to a position. The global generators stay as they are: set them afterwards.

        Raises:
            CheckpointError: These are not the batches that the position was saved with.
        """
        if (position["own"] is not None) != self._is_stateful():
            has, had = ("has", "had none") if self._is_stateful() else ("has no", "had one")
            raise CheckpointError(
                f"Workload.batches {has} state_dict(), and the checkpoint's {had}: give the batches it was made with"
            )
        with rng_preserved():
            if position["own"] is None:
                self._skip(position)
            else:
                self._load(position)
        self.epoch, self.used = position["epoch"], position["used"]
        self._epoch_start = position["epoch_start"]
        self._may_be_empty = self.used == 0

    def _end_epoch(self) -> None:
        if self.used == 0 and not self._may_be_empty:
            raise WorkloadError(
                f"Workload.batches gave no batch in epoch {self.epoch}: it must be an iterable that can be iterated"
                " again for every epoch, such as a list or a DataLoader, and not a generator"
            )
        self.epoch += 0 if self.used == 0 else 1
        self.used = 0
        self._may_be_empty = False
        self._iterator = None

    def _is_stateful(self) -> bool:
        return all(callable(getattr(self._batches, name, None)) for name in ("state_dict", "load_state_dict"))

    def _epoch_length(self) -> int | None:
        try:
            return len(self._batches)
        except TypeError:
            return None

    def _load(self, position: dict[str, Any]) -> None:
        try:
            self._batches.load_state_dict(position["own"])
        except MemfitError:
            raise
        except Exception as e:
            raise CheckpointError(f"Workload.batches did not take the checkpoint's position: {e!r}") from e
        self._iterator = iter(self._batches) if position["used"] else None

    def _skip(self, position: dict[str, Any]) -> None:
        """Iterate the epoch again, as it began, up to the position."""
        self._set_random_state(position["epoch_start"])
        self._iterator = iter(self._batches) if position["used"] else None
        for used in range(position["used"]):
            try:
                next(self._iterator)  # type: ignore[arg-type]
            except StopIteration as e:
                raise CheckpointError(
                    f"Workload.batches gave {used} batches in epoch {position['epoch']}, of which the checkpoint used"
                    f" {position['used']}: give the batches it was made with"
                ) from e

    def _random_state(self) -> dict[str, Any]:
        return {"global": rng_state(), "own": [generator_state(g) for g in _generators(self._batches)]}

    def _set_random_state(self, state: dict[str, Any]) -> None:
        generators = _generators(self._batches)
        if len(generators) != len(state["own"]):
            raise CheckpointError(
                f"Workload.batches has {len(generators)} generators, and had {len(state['own'])} in the checkpoint:"
                " give the batches it was made with"
            )
        for generator, own in zip(generators, state["own"], strict=True):
            generator.set_state(bytes_tensor(own))
        set_rng_state(state["global"])


def _generators(batches: Any) -> list[torch.Generator]:
    """Return the generators that a loader or its samplers shuffle by."""
    sampler, batch_sampler = (getattr(batches, name, None) for name in ("sampler", "batch_sampler"))
    owners = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())

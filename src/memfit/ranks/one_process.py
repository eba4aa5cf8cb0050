"""A process that trains by itself, and what a step asks of it; those that share a step answer otherwise."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from memfit.workload import Workload, samples_of

Number = torch.Tensor | float


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch.

    Attributes:
        batch: The part; some sample, which counts nothing, where `samples` is 0.
        samples: Its samples (≥ 0).
        mean_samples: Samples of a rank on average: the weight of a mean over `n` samples is `n / mean_samples`.
        most_samples: Samples of the largest part.
    """

    batch: Any
    samples: int
    mean_samples: float
    most_samples: int


class SingleProcess:
    """A process that trains by itself: it agrees with itself.

    Attributes:
        is_updating: Whether all have agreed to update, so that the step can't be undone any more.
    """

    is_updating = False

    def begin(self) -> None:
        """Note that a step begins."""

    def average(self) -> None:
        """Average the gradients, once all ranks have finished their backward passes."""

    def finish(self) -> None:
        """Note that a step is done, with an update or without."""

    def failed(self, ran_out: bool) -> bool:
        """Tell the other ranks that this one aborts the step; return whether all aborting ranks ran out of memory."""
        return ran_out

    def settle(self) -> None:
        """Make the buffers of all ranks equal."""

    def all(self, value: bool) -> bool:
        """Tell whether a value is true on every rank."""
        return value

    def most(self, values: list[float]) -> list[float]:
        """Return the maximum over the ranks of each value."""
        return values

    def first(self, value: int) -> int:
        """Return the value of the first rank."""
        return value

    def close(self) -> None:
        """Stop watching the optimizer."""

    @property
    def buckets(self) -> list[torch.Tensor]:
        """What gradients are sent in, where an engine holds that between steps; known once a step ran in a capture."""
        return []

    # What a step asks

    def share(self, workload: Workload, batch: Any) -> Share:
        """Return this rank's part of a global batch."""
        samples = samples_of(workload, batch)
        return Share(batch, samples, samples, samples)

    def means(self, values: list[Number]) -> list[Number]:
        """Return the means over all ranks of some numbers."""
        return values

    def mean(self, value: Number) -> Number:
        """Return the mean over all ranks of a number."""
        return self.means([value])[0]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor whole, of which each rank has a shard or a part of a sum."""
        return tensor

    def syncing(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Make the context of a microbatch's passes: gradients of the last are sent, of others where that is asked."""
        return contextlib.nullcontext()

    def drawing(self) -> contextlib.AbstractContextManager[object]:
        """Make the context of a step in which ranks draw different random numbers, and the same afterwards."""
        return contextlib.nullcontext()

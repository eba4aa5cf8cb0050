"""The seam to private symbols of transformers and accelerate: what they have no public way for."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState


def train_batch_size(trainer: Any) -> int:
    """Return the samples of each batch that a `transformers.Trainer` takes from its training loader."""
    return int(trainer._train_batch_size)


def set_train_batch_size(trainer: Any, samples: int) -> None:
    """Have a trainer's next training loader make batches of so many samples; its arguments are read once only."""
    trainer._train_batch_size = samples


def forget_accelerator_state() -> None:
    """Let the next `Accelerator` of this process have another precision than the ones before."""
    AcceleratorState._reset_state()

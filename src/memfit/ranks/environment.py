"""What a launcher such as torchrun tells each of the processes that it starts, by variables."""

from __future__ import annotations

import os

from memfit.errors import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Tell whether a launcher has started this process."""
    return all(os.environ.get(name) for name in _VARIABLES)


def launched_by_torchrun() -> bool:
    """Tell whether torchrun has started this process, and keeps the store at MASTER_ADDR itself."""
    return is_launched() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launched_size() -> int:
    """Return how many processes a launcher has started, this one among them; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def check_shared(size: int, what: str, remedy: str) -> None:
    """Check that all processes of a launcher share a step: others would train by themselves, on all of the data.

    Raises:
        UsageError: A launcher has started more or fewer.
    """
    if launched_size() not in (1, size):
        by = "one process" if size == 1 else f"{size} processes"
        raise UsageError(
            f"{what} is for {by}, and a launcher started {launched_size()}. Each would train alone, on all of the data:"
            f" {remedy}"
        )


def launched_rank() -> int:
    """Return this process's number among them, from 0."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """Return its number among those on its host."""
    return int(os.environ.get("LOCAL_RANK", launched_rank()))

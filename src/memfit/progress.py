"""Progress of long calls, as they report it to whoever waits."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and of how much."""

StageProgress = Callable[[int, int], None]
"""Called with how much of one stage is done, and of how much."""


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""

"""Why a rank aborts a step: thrown and caught within memfit."""

from __future__ import annotations


class PeerError(Exception):
    """Another rank aborted a step.

    Args:
        ran_out: Whether all aborting ranks ran out of memory.
    """

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out
        super().__init__("another rank ran out of memory" if ran_out else "another rank failed with an error")


class UnansweredError(Exception):
    """A rank failed where it can't tell the others."""

"""A device that steps run on."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that steps can run on.

    Attributes:
        name: As `device=` takes it.
        kind: "cpu" or "cuda".
        description: What it is.
        memory_bytes: What it has.
        usable_bytes: What a step may use: without what is taken, within the limits of the process.
        cores: Threads that PyTorch uses, or multiprocessors.
    """

    name: str
    kind: str
    description: str
    memory_bytes: int
    usable_bytes: int
    cores: int

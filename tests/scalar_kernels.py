"""Kernels that Inductor makes without vector instructions: of the same tensors, and made in two thirds of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def scalar_kernels() -> Iterator[None]:
    """Have Inductor make such kernels, where a test asks what steps hold and compute, and one beside it has vectors."""
    from torch._inductor import config  # takes a second

    with config.patch({"cpp.simdlen": 0}):
        yield

"""A probe of recomputations: does a region, run again, make what it made before, bit by bit?"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import RecomputationError

Differences = dict[tuple[str, ...], RecomputationError]
"""The first difference in each region, by its modules."""

_differences: Differences | None = None


@contextlib.contextmanager
def probing() -> Iterator[Differences]:
    """Compare what regions recompute with what they made before, which is kept meanwhile, and used.

    For passes whose forward and backward pass run within the context. Where values are fake, shapes are compared.
    Nothing is raised: regions that do something else when they run again are in the result.
    """
    global _differences
    before, _differences = _differences, {}
    try:
        yield _differences
    finally:
        _differences = before


def current() -> Differences | None:
    """Return where differences are to be noted, None where nothing is probed."""
    return _differences


def other_generators() -> tuple[Any, ...]:
    """Return the states of the generators that recomputations do not set back: Python's and NumPy's."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how the bits of two tensors of one shape and type differ; None where they do not, or can't be read."""
    if is_fake(expected) or expected.layout is not torch.strided:
        return None
    with torch.no_grad(), _disable_current_modes():
        differing = int((_bits(found) != _bits(expected)).sum())
    return f"{differing} of {expected.numel()} elements of a saved tensor have other values" if differing else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers: NaN is not equal to itself."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return real.contiguous().view(integer)

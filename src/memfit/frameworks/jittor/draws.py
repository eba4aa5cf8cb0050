"""Reproducible random numbers: a function of a seed and a count, instead of a generator's hidden state.

Jittor's generator can be seeded, but its state can't be read: recomputed regions and resumed trainings would draw other
numbers. Inside `substituted`, `jt.random`, through which Jittor draws all its uniform and normal numbers (dropout,
`jt.rand`, `jt.randn`, `jt.randint`, initialisations), hashes the index of each element with a seed and the count of the
draw: counter-based, as in J. K. Salmon et al. (2011), *Parallel Random Numbers: As Easy as 1, 2, 3*, with the finalizer
of MurmurHash3 (A. Appleby) as the hash, which is enough for masks and noise but not cryptographic. The numbers differ
from Jittor's own, with the same distribution.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memfit.frameworks.jittor.internals import jt

_WORD = 2**32
_GOLDEN = 0x9E3779B9
_UNIT = 2.0**-24


@dataclass
class Draws:
    """A position in a sequence of random numbers.

    Attributes:
        seed: The seed of the sequence (0 up to 2**32).
        count: Number of draws made.
    """

    seed: int = 0
    count: int = 0


draws = Draws()
"""The sequence in use."""


def seed(value: int) -> None:
    """Restart the sequence that `checkpoint` draws from, and seed Jittor, NumPy and Python.

    Pending operators run first: Jittor draws when it executes, so that `jt.set_global_seed` also changes draws that
    were requested before.
    """
    jt.sync_all()
    jt.set_global_seed(value)
    draws.seed, draws.count = value % _WORD, 0


@contextlib.contextmanager
def substituted(start: Draws | None = None) -> Iterator[None]:
    """Draw from the sequence: from its position, or again from `start`, and return to its position afterwards."""
    original, before = jt.random, Draws(draws.seed, draws.count)
    if start is not None:
        draws.seed, draws.count = start.seed, start.count
    jt.random = _random
    try:
        yield
    finally:
        jt.random = original
        if start is not None:
            draws.seed, draws.count = before.seed, before.count


def _random(shape: Any, dtype: str = "float32", type: str = "uniform") -> Any:
    """Replace `jt.random`: return random numbers of a shape, uniform in [0, 1) or standard normal."""
    sizes = [int(n) for n in (jt.NanoVector(shape) if isinstance(shape, int) else shape)]
    key = _hash_number(draws.seed ^ _hash_number(draws.count))
    draws.count += 1
    if type == "uniform":
        values = _uniform(sizes, key)
    else:  # Box and Muller (1958)
        radius = jt.sqrt(-2.0 * jt.log(1.0 - _uniform(sizes, key)))
        values = radius * jt.cos((2 * math.pi) * _uniform(sizes, _hash_number(key)))
    return values.cast(dtype).stop_grad()


def _uniform(sizes: list[int], key: int) -> Any:
    """Return 24 random bits for each element, as a fraction in [0, 1)."""
    index = jt.arange(math.prod(sizes)).uint32()
    word = _mixed(index * _word(_GOLDEN) + _word(key))
    return ((word >> 8).float32() * _UNIT).reshape(sizes)


def _mixed(word: Any) -> Any:
    """Return MurmurHash3's finalizer of words; it casts, since Jittor's products of unsigned words are signed."""
    word = word.uint32()
    word = ((word ^ (word >> 16).uint32()).uint32() * _word(0x85EBCA6B)).uint32()
    word = ((word ^ (word >> 13).uint32()).uint32() * _word(0xC2B2AE35)).uint32()
    return (word ^ (word >> 16).uint32()).uint32()


def _word(value: int) -> Any:
    return jt.array([value], dtype="uint32")


def _hash_number(value: int) -> int:
    """Return the hash of `_mixed` for one number."""
    word = (value + _GOLDEN) % _WORD
    word = (word ^ word >> 16) * 0x85EBCA6B % _WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 % _WORD
    return word ^ word >> 16

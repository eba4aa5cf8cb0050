"""Random numbers that decide the operators of a step, as where layers are dropped at random.

A capture starts from the present states of the generators. Other draws are tried with generators that draw the least
and the greatest numbers, and with other seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from memfit.own_generators import default_generator

Extreme = Literal["", "low", "high"]

_WORDS = 624  # of the Mersenne twister's state
_ONES = 0xFFFFFFFF
_ALMOST_ONE = 1 - 2**-20
_aten = torch.ops.aten
_UNIFORM = {_aten.rand, _aten.rand_like, _aten.uniform, _aten.uniform_}
_BERNOULLI = {_aten.bernoulli, _aten.bernoulli_}


@dataclass(frozen=True)
class GeneratorStates:
    """The states of Python's, NumPy's and PyTorch's global generators.

    Attributes:
        extreme: Whether the generators draw the least ("low") or the greatest ("high") numbers; "" for neither.
    """

    python: Any
    numpy: Any
    extreme: Extreme = ""
    of_torch: torch.Tensor = field(default_factory=lambda: default_generator().get_state(), compare=False)

    @classmethod
    def now(cls) -> GeneratorStates:
        """Return the present states."""
        name, keys, *rest = np.random.get_state()
        return cls(random.getstate(), (name, tuple(np.asarray(keys).tolist()), *rest))

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """Return the states of generators with a seed."""
        name, keys, *rest = np.random.RandomState(seed).get_state()
        return cls(random.Random(seed).getstate(), (name, tuple(np.asarray(keys).tolist()), *rest))

    @classmethod
    def drawing(cls, extreme: Literal["low", "high"]) -> GeneratorStates:
        """Return states from which Python's and NumPy's generators draw extreme numbers, some hundreds of times."""
        # Both are the Mersenne twister, whose next words are its state's, tempered.
        word = 0 if extreme == "low" else _untempered(_ONES)
        last = random.Random(0)  # other words at the end: code that draws until a number differs comes to an end
        words = (*[word] * (_WORDS - 24), *(last.getrandbits(32) for _ in range(24)))
        return cls((3, (*words, 0), None), ("MT19937", words, 0, 0, 0.0), extreme)

    def has_states_of(self, other: GeneratorStates) -> bool:
        """Tell whether Python's and NumPy's generators have the same states as in another object."""
        return (self.python, self.numpy) == (other.python, other.numpy)

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        default_generator().set_state(self.of_torch)


def _untempered(word: int) -> int:
    """Return the word of the Mersenne twister's state that is tempered to a given word.

    M. Matsumoto, T. Nishimura (1998), *Mersenne Twister*, section 2.1; each line undoes one of its shifts.
    """
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    state = word
    for _ in range(5):
        state = word ^ ((state << 7) & 0x9D2C5680)
    word = state
    for _ in range(3):
        state = word ^ (state >> 11)
    return state & _ONES


def random_output(func: Callable[..., Any], name: Any, args: Any, kwargs: Any, extreme: Extreme) -> Any:
    """Return the output of a random operator on the CPU; the least or greatest numbers where it draws evenly."""
    out = func(*args, **kwargs)
    if not extreme or not isinstance(out, torch.Tensor):
        return out
    if name in _UNIFORM:
        given: Any = args[1:3] if name in (_aten.uniform, _aten.uniform_) and len(args) > 2 else None
        low, high = given or (0.0, 1.0)
        return out.fill_(low if extreme == "low" else low + (high - low) * _ALMOST_ONE)
    return out.fill_(extreme == "low") if name in _BERNOULLI else out

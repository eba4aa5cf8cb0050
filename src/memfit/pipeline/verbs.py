"""What all verbs share: they run one at a time, leave generators to other threads, and end at safe points alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memfit.interrupts import held_back
from memfit.own_generators import generators_of_turn
from memfit.training.step import Step
from memfit.turns import turn

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=Step)


def verb(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function a verb.

    A verb in another thread waits until it is done. A signal whose handler raises ends it at a safe point
    (`memfit.interrupts`). In a process with several threads it draws from generators of its own.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with held_back(ends_steps=True), turn(), generators_of_turn():
            return function(*args, **kwargs)

    return run


def applying(function: Callable[_P, _S]) -> Callable[_P, _S]:
    """Make a function that applies a plan a verb, with the global generators: what it draws is the user's.

    Where a signal ends it after all was done, the plan is taken back: nobody has the step to close.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _S:
        step: _S | None = None
        try:
            with held_back(), turn():
                step = function(*args, **kwargs)
        except BaseException:
            if step is not None:
                step.close()
            raise
        return step

    return run


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make signals end a function at a safe point alone; other threads may run verbs meanwhile."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with held_back():
            return function(*args, **kwargs)

    return run

"""Replacement of PyTorch's own functions, and of other attributes, while a context is entered."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memfit.foundations import here

_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, until the context is left."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def replaced_here(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class or a module that other threads go on using, until the context is left."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, here(function, getattr(owner, name)))
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

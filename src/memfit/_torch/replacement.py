"""Replacement of PyTorch's own functions, and of other attributes, while a context is entered."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, until the context is left."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

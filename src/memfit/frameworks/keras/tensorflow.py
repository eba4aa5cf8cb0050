"""Keras and TensorFlow, imported once for the rest of the room."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from memfit.errors import UsageError, brought_by

with brought_by("keras", "memfit.keras"):
    import keras
    import tensorflow as tf

__all__ = ["check_backend", "keras", "tf"]


def check_backend() -> None:
    """Check that Keras runs on TensorFlow.

    Raises:
        UsageError: It runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"memfit.keras needs KERAS_BACKEND=tensorflow, not {keras.backend.backend()!r}")

"""Keras and TensorFlow, imported once for the rest of the room, and the seam to what they don't tell publicly."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from memfit.errors import UsageError, brought_by

with brought_by("keras", "memfit.keras"):
    import keras
    import tensorflow as tf

__all__ = ["keras", "tf"]


def check_backend() -> None:
    """Check that Keras runs on TensorFlow.

    Raises:
        UsageError: It runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(f"memfit.keras needs KERAS_BACKEND=tensorflow, not {keras.backend.backend()!r}")


def functional(model: Any) -> Any:
    """Return the functional model that a model is, or that is within a sequential one; None where there is none."""
    inner = model._functional if isinstance(model, keras.Sequential) else model
    return inner if hasattr(inner, "_nodes_by_depth") else None


def nodes(model: Any) -> list[Any]:
    """Return the calls that a functional or sequential model makes, in the order in which it makes them."""
    by_depth = functional(model)._nodes_by_depth
    ordered = (node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth])
    return [node for node in ordered if node.operation and not node.is_input]


def caller(operation: Any, training: bool | None) -> Callable[..., Any]:
    """Return an operation as a functional model calls it: with `training` where it takes that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if training is not None and getattr(operation, "_call_has_training_arg", False):
            kwargs["training"] = training
        return operation(*args, **kwargs)

    return call


def weights_within(layer: Any) -> list[Any]:
    """Return the weights of a layer and of those inside it, without variables such as a generator's state."""
    return [variable for inner in layer._flatten_layers() for variable in inner._trainable_variables]


def losses_added(layer: Any) -> int:
    """Return how many losses a layer's calls, and those of layers inside it, have added."""
    return sum(len(inner._losses) for inner in layer._flatten_layers())


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer put on a tensor; None where there is none."""
    return getattr(tensor, "_keras_mask", None)

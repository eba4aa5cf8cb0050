"""The seam to private symbols of Keras: what layers don't tell publicly."""

from __future__ import annotations

from typing import Any


def call_count(layer: Any) -> int:
    """Return how many times a layer was called in building its model."""
    return len(layer._inbound_nodes)


def weights_within(layer: Any) -> list[Any]:
    """Return the weights of a layer and of those inside it, without variables such as a generator's state."""
    return [variable for inner in layer._flatten_layers() for variable in inner._trainable_variables]

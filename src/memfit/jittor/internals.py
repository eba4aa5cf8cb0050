"""The seam to private symbols of Jittor."""

from __future__ import annotations

from typing import Any


def keep_gradients(optimizer: Any) -> None:
    """Have an optimizer's next `step` add to the gradients that are there, as after its own `backward`."""
    optimizer._Optimizer__zero_grad = False

"""Jittor, imported in working order for the rest of the room, and the seam to its private symbols."""

from __future__ import annotations

from typing import Any

from memfit import hardware

jt: Any = hardware.jittor_doctor.load()


def keep_gradients(optimizer: Any) -> None:
    """Have an optimizer's next `step` add to the gradients that are there, as after its own `backward`."""
    optimizer._Optimizer__zero_grad = False

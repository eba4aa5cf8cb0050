"""Jittor and Keras, planned from measured layers: the room of `memfit.jittor` and `memfit.keras`.

Each framework measures its layers and applies regions by its own means. `measured_layers` has the planner that both
share, on the same solver and the same plan files.
"""

import sys


def opened(room: str, name: str) -> None:
    """Let the modules of a room be imported by its public name, too, each loaded once."""
    for module in [m for m in sys.modules if m.startswith(f"{room}.")]:
        sys.modules[name + module.removeprefix(room)] = sys.modules[module]

"""Other frameworks than PyTorch: what is behind `memfit.jittor` and `memfit.keras`."""

import sys


def opened(room: str, name: str) -> None:
    """Let the modules of a room be imported by its public name, too, each loaded once."""
    for module in [m for m in sys.modules if m.startswith(f"{room}.")]:
        sys.modules[name + module.removeprefix(room)] = sys.modules[module]

"""The foundations of every room, without PyTorch: tracebacks of users' code, units, interrupts.

`frames` finds the user's own line and ends an error there, `interrupts` holds signals back while state is
changed, and `turns` lets one thread at a time replace what PyTorch looks up.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

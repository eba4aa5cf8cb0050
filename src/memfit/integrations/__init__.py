"""Integrations with other trainers: they keep the loop, memfit sets precision, microbatch size and checkpointing.

Import the one that you use: `memfit.integrations.transformers`, `.lightning` or `.accelerate`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The engine that runs regions again in the backward pass, bit by bit as they ran before.

Saved tensors of a region are recomputed or offloaded when the backward pass asks for them, under the random states and
the autocast of the first run. `probe` compares what was recomputed with what was saved.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The records (`Trace`, `CostTable`, `Timeline`, `Plan`, `RunRecord`) and `simulate`, which defines a peak. No torch.

All that stages hand to each other is defined here, and `codec` reads and writes it. What is calculated from records
alone is here too: lifetimes under recomputation, offload, collectives, and the CUDA caching allocator.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

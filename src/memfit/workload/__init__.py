"""The training step as its user gives it: model, batch, loss, and the state that they hold and draw from.

A `Workload` is a step that is described, a `LoopWorkload` one that was recorded. Batches are trees of tensors: they are
measured, cut and moved here. Calls of operators have signatures, which tell them apart and call them again.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

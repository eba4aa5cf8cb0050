"""Compiled steps: the joint graph, the kernels that Inductor fuses, its partition, and kernels recorded without code.

A plan under `torch.compile` is recorded and applied here: regions are recomputed in the joint graph, and the kernels
of the graph are told from Inductor's own scheduler. Nothing is compiled to predict a step.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The engines that run regions again in the backward pass: eager code bit by bit, compiled code in its joint graph.

Saved tensors of an eager region are recomputed or offloaded when the backward pass asks for them, under the random
states and the autocast of the first run; `probe` compares what was recomputed with what was saved. Under
`torch.compile` the joint graph recomputes regions; its kernels are told as Inductor would fuse them, and nothing is
compiled to predict a step.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Many ranks: PyTorch's engines on a step, their agreement where one fails, and one rank's share calculated.

`engines` puts DistributedDataParallel or `fully_shard` on a workload, `group` is what a step asks of the others, and
`mesh` makes their meshes, live or fake. What one rank of many holds and sends is inserted into a trace, without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

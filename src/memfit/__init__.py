"""memfit makes a PyTorch training step fit the memory you have, at the smallest slow-down that can be found.

plan = memfit.plan(workload, budget="1.5GiB")
print(plan)
step = memfit.apply(plan, workload)
result = step(batch)
"""

import lazy_loader

# PyTorch and its users are imported when a public name is first used: help and shell completion do without.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The step and the trainer: order of operations, batches, loss scaling, optimizers, runs, and guards of memory.

`Step` is one training step under a plan; `Trainer` calls it, logs, and resumes bitwise from checkpoints. `guards` watch
limits and recover from errors, and `runs` keeps a run's folder, lock, log and checkpoints.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

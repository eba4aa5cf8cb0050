"""The verbs, composed of the stages: estimate, plan, fleet, apply, fit, train and verify, and the files that they read.

Each verb is one file of its name. They check what they are given, run where the plan is for (here, in a process with
fake CUDA, on ranks), and return records of `memfit.ir`. Importing this room has notebooks show those records.
"""

import lazy_loader

from memfit.report import show_records

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

show_records()

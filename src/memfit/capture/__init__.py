"""The user's step under fake tensors, as a `Trace`: operators, storages and their lifetimes, recorded without data.

`capture` takes a `CaptureJob` and returns the trace of one steady step; what code reads of its tensors' values is
found by a run with data, and control flow that depends on it is refused or followed. `measure_peak_bytes` runs a step
as it is and returns what the allocator was asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

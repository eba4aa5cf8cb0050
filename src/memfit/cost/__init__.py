"""Seconds and workspace bytes of each distinct operator: measured on devices that are here, or modelled for a GPU.

A `CostSource` answers for the operators of traces with a `CostTable`; measured costs are kept in a file for the next
run. Error bars say how sure predictions are, by what measured steps have shown.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

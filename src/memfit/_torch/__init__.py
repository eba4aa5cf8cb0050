"""The seam to PyTorch's private symbols: the modules, names and attributes with an underscore that memfit uses.

Each is imported here under a public name, and nowhere else in memfit. `tests/_torch` has a contract test for each: a
new PyTorch that moved or changed one fails there, by name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

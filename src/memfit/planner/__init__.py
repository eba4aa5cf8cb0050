"""A plan in three parts: captures, search, confirmation; `assembly` puts them together.

It asks every lever for what it proposes, has combinations captured and solved, and confirms the fastest that fits by a
capture with its regions and one step with data. Near ties are measured in turns. `fleet` searches cards and ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Levers that save memory or time, with their registry and the context that puts them on a step.

A lever proposes settings, says what it does not go with, and applies itself to a workload. `applied` puts the levers of
a plan on a step, and a `Switch` changes between the points of a frontier while it trains.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Regions to recompute within a budget, as a mixed-integer program, and the frontier of plans. No torch.

Candidates are written as linear inequalities, one for each point of the step at which memory may peak, and HiGHS proves
the optimum or says how far it may be. `Controller` chooses among solved plans as shapes vary.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

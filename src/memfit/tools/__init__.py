"""Tools beside planning: the ladder of levers, number ranges, samples sorted or packed, BatchNorm replaced.

`ladder` measures levers one on top of the other, `probe_range` the numbers that reduced precision would lose. They run
the user's step; nothing else in memfit needs them.
"""

from memfit.structure import freeze_batch_norm, group_norm_for_batch_norm
from memfit.tools._by_length import ByLength
from memfit.tools._ladder import ladder
from memfit.tools._packed import Packed
from memfit.tools._probe_range import probe_range

__all__ = [
    "ByLength",
    "Packed",
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "probe_range",
]

"""Tools: levers and number ranges measured, and BatchNorm replaced."""

from memfit.structure.batch_norm import freeze_batch_norm, group_norm_for_batch_norm
from memfit.tools._ladder import ladder
from memfit.tools._probe_range import probe_range

__all__ = [
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "probe_range",
]

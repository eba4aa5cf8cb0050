"""Tools: levers and number ranges measured, and BatchNorm replaced."""

from memfit._ladder import ladder
from memfit.pipeline import probe_range
from memfit.structure.batch_norm import freeze_batch_norm, group_norm_for_batch_norm

__all__ = [
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "probe_range",
]

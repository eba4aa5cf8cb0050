"""Tools: levers and number ranges measured, BatchNorm replaced, and a budget for graphs of `torch.compile`."""

from memfit._ladder import ladder
from memfit.pipeline import compile_backend, probe_range
from memfit.structure.batch_norm import freeze_batch_norm, group_norm_for_batch_norm

__all__ = [
    "compile_backend",
    "freeze_batch_norm",
    "group_norm_for_batch_norm",
    "ladder",
    "probe_range",
]

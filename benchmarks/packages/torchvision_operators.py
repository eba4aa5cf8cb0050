"""What lets torchvision be imported beside the CPU build of torch: PyPI has its operators for CUDA only.

Its Python part needs them declared, and the packages here import it without calling them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _declare() -> torch.library.Library | None:
    """Return a library that declares torchvision's operators; None where it has its own, or is absent."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            declared.define(operator)
        return declared
    return None


_DECLARED = _declare()  # held, since they go with it

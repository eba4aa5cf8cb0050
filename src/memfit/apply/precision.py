"""Precision as a lever: autocast around the forward pass, and loss scaling for fp16."""

from __future__ import annotations

import contextlib

import torch

from memfit.ir.plan import Precision

_AUTOCAST: dict[Precision, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def autocast(precision: Precision, device: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the forward pass runs."""
    dtype = _AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

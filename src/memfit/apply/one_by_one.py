"""An optimizer's step for some of its parameters, as a part of its whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def restricted(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Have an optimizer see only some parameters of one of its groups, until the context is left."""
    groups, before = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], list(parameters)
    try:
        yield
    finally:
        optimizer.param_groups, group["params"] = groups, before

"""Out of memory at a chosen operator, for tests that injure a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Bomb(TorchDispatchMode):
    """Counts operators and raises instead of running some of them.

    Args:
        at: Which operators fail, from 1.
    """

    def __init__(self, *at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.count = set(at), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")
        return func(*args, **(kwargs or {}))

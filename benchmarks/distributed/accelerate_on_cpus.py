"""accelerate's FSDP2 on CPUs, where it goes on with DistributedDataParallel by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


@contextlib.contextmanager
def fully_sharded_on_cpus() -> Iterator[None]:
    """Have accelerate take its FSDP plugin on CPUs too."""
    own = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", with_plugin):
        yield

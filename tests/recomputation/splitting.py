"""A back end of `torch.compile` that shows a joint graph to whoever splits it, and runs its operators one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config


def split_by(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> Callable[..., Any]:
    """Return a back end that has a function split each joint graph, as "aot_eager" with a partitioner of one's own."""

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)(
                module, inputs
            )

    return backend

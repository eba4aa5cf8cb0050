"""Joint graphs: a back end of `torch.compile` that shows them and runs their operators one at a time; drawn by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config

from memfit.recomputation import JointGraph
from memfit.recomputation.joint_rewriter import recompute_regions


def split_by(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> Callable[..., Any]:
    """Return a back end that has a function split each joint graph, as "aot_eager" with a partitioner of one's own."""

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)(
                module, inputs
            )

    return backend


class Drawn:
    """A graph drawn by hand, with tensors on no device as values."""

    def __init__(self) -> None:
        self.graph, self.nodes = fx.Graph(), list[fx.Node]()

    def given(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, func: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(func, args)
        node.meta = meta or {"val": func(*fx.map_arg(args, lambda given: given.meta["val"]))}
        self.nodes.append(node)
        return node

    def marked(self, key: str, value: Any, func: Any, *args: Any) -> fx.Node:
        node = self.call(func, *args)
        node.meta[key] = value
        return node

    def joint(self, forward_outputs: int = 0) -> JointGraph:
        self.graph.output(tuple(self.nodes[-1:]))
        return JointGraph(self.graph, forward_outputs, "drawn", Counter())

    def kernels(self) -> list[set[str]]:
        return [{node.name for node in nodes} for nodes in self.joint().ops]

    def rewritten(self, *outputs: fx.Node) -> None:
        """Rewrite the graph, which gives the same bits as before."""
        self.graph.output(outputs)
        values = [torch.randn(node.meta["val"].shape) for node in self.graph.find_nodes(op="placeholder")]
        before = fx.GraphModule({}, self.graph)(*values)
        recompute_regions(self.graph, 0, "drawn", [], Counter())
        self.graph.lint()
        assert all(torch.equal(*pair) for pair in zip(fx.GraphModule({}, self.graph)(*values), before, strict=True))

"""Convolutions with their channels last, said in the graph itself, so that the copies this takes are planned for.

Inductor can do the same by itself (`layout_optimization`), but copies weights at the start and keeps the copies for the
backward pass, where no plan sees them: 36 MiB at the peak of a ResNet-50. Here each is made where it is used.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

_TAKES = {torch.ops.aten.convolution.default: (0, 1), torch.ops.aten.convolution_backward.default: (0, 1, 2)}
"""Of convolutions, the arguments to lay out: what is convolved, the gradient, the weight."""

_FEW = 0.1
"""The share of convolutions up to which what others make may have to be copied for them.

Group normalisation, which shows groups of channels as rows, would have it copied for all; and Inductor moves such
copies to where they take more memory than planned: 1.2 % beyond the upper end for a small U-Net.
"""


def lay_out_channels_last(graph: fx.Graph) -> bool:
    """Let 2-dimensional convolutions take and make tensors whose channels are last in memory.

    What the graph returns is laid out as before.

    Args:
        graph: A joint graph, which is changed; its nodes hold the fake tensors that they make in `meta["val"]`.

    Returns:
        Whether there are such convolutions and nearly all else keeps this layout; if not, the graph is not to be used.
    """
    nodes = list(graph.nodes)
    mode = detect_fake_mode([node.meta.get("val") for node in nodes])
    convolutions = sum(map(_is_convolution, nodes))
    if mode is None or not convolutions:
        return False
    returned = {node for node in tree_leaves(graph.output_node().args[0]) if isinstance(node, fx.Node)}
    with mode, torch.no_grad():
        try:
            copied = sum(_lay_out(node, node in returned) for node in nodes if node.op == "call_function")
        except (RuntimeError, TypeError, ValueError):  # of an operator that shows a tensor as it lies
            return False
    return copied <= _FEW * convolutions


def show_in_any_layout(graph: fx.Graph) -> None:
    """Replace `as_strided`, which reads memory as it lies, by a view wherever that says the same of a dense tensor.

    Group normalisation is decomposed to it. What is laid out otherwise would be read in another order.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        given, shown = node.args[0].meta["val"], node.meta["val"]
        if given.is_contiguous() and shown.is_contiguous() and given.numel() == shown.numel() and not node.args[3:]:
            node.target, node.args = torch.ops.aten.view.default, (node.args[0], list(shown.shape))


def _is_convolution(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if node.target in _TAKES and isinstance(node.args[0], fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _lay_out(node: fx.Node, returned: bool) -> bool:
    """Find anew what a node makes, which takes what was laid out before it.

    Returns:
        Whether something was copied for it that another operator makes.
    """
    copied = False
    if _is_convolution(node):
        for position in _TAKES[node.target]:  # type: ignore[index]
            given = node.args[position]
            if isinstance(given, fx.Node) and not _is_last(given.meta["val"]):
                copied |= given.op == "call_function"
                node.update_arg(position, _copy(given, node, torch.channels_last))
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        raise TypeError(f"what {node.target} makes is not known in another layout")
    before = node.meta.get("val")
    try:
        node.meta["val"] = _value(node)
    except ValueError:
        given = node.args[0]
        if node.target is not torch.ops.aten.view.default or not isinstance(given, fx.Node):
            raise
        node.update_arg(0, _copy(given, node, torch.contiguous_format))
        node.meta["val"] = _value(node)
    if returned and isinstance(before, torch.Tensor) and before.stride() != node.meta["val"].stride():
        if not before.is_contiguous():
            raise TypeError(f"{node} is returned in a layout that is not dense")
        copy = _copy(node, node.next, torch.contiguous_format, node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copied


def _value(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _copy(node: fx.Node, before: fx.Node, layout: torch.memory_format, meta: dict[str, Any] | None = None) -> fx.Node:
    """Put a copy of what a node makes before another one, for which it counts."""
    with node.graph.inserting_before(before):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": layout})
    copy.meta = {**(before.meta if meta is None else meta)}
    copy.meta["val"] = torch.ops.aten.clone.default(node.meta["val"], memory_format=layout)
    return copy

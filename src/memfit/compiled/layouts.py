"""Layouts and dtypes that Inductor runs fast with, set in the joint graph itself, so that plans count them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from memfit._torch.dispatch import OpOverload
from memfit._torch.fake import detect_fake_mode
from memfit._torch.tensors import tree_leaves
from memfit.compiled.joint_graph import mark_kept

_aten, _prims = torch.ops.aten, torch.ops.prims
_CPU = torch.device("cpu")
_DRAWS = "prims.inductor_random.default"  # registered once Inductor is imported
_TAKES = {_aten.convolution.default: (0, 1), _aten.convolution_backward.default: (0, 1, 2)}
"""The positions of a convolution's arguments to lay out: input, gradient and weight."""

_FEW = 0.1
"""The largest share of convolutions whose inputs, made by other operators, may be copied.

With group normalisation all would be: it views groups of channels as rows. Inductor moves such copies to where they
take more memory than planned: 1.2 % beyond the upper end for a small U-Net.
"""


def lay_out_channels_last(graph: fx.Graph) -> bool:
    """Lay out the inputs and outputs of 2-dimensional convolutions with channels last, but not the graph's outputs.

    Inductor's own `layout_optimization` copies weights at the start and keeps the copies for the backward pass, unseen
    by the plan: 36 MiB at the peak of a ResNet-50. Here each copy is made where it is used.

    The nodes of the joint graph hold their fake tensors in `meta["val"]`. Returns whether it has such convolutions and
    few copies; if not, it must not be used.
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
        except (RuntimeError, TypeError, ValueError):  # an operator views the memory's layout
            return False
    return copied <= _FEW * convolutions


def show_in_any_layout(graph: fx.Graph) -> None:
    """Replace `as_strided` by a view of the same elements where its input is contiguous.

    Group normalisation is decomposed to it; in another layout it would read the elements in another order.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        given, shown = node.args[0].meta["val"], node.meta["val"]
        if given.is_contiguous() and shown.is_contiguous() and given.numel() == shown.numel() and not node.args[3:]:
            node.target, node.args = _aten.view.default, (node.args[0], list(shown.shape))


def _is_convolution(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if node.target in _TAKES and isinstance(node.args[0], fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _lay_out(node: fx.Node, returned: bool) -> bool:
    """Recompute a node's fake output from its inputs' new layouts; tell whether another's output was copied for it."""
    copied = False
    if _is_convolution(node):
        for position in _TAKES[node.target]:  # type: ignore[index]
            given = node.args[position]
            if isinstance(given, fx.Node) and not given.meta["val"].is_contiguous(memory_format=torch.channels_last):
                copied |= given.op == "call_function"
                node.update_arg(position, _copy(given, node, torch.channels_last))
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        raise TypeError(f"the output of {node.target} in another layout is not known")
    before = node.meta.get("val")
    try:
        node.meta["val"] = _value(node)
    except ValueError:
        given = node.args[0]
        if node.target is not _aten.view.default or not isinstance(given, fx.Node):
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


def _copy(node: fx.Node, before: fx.Node, layout: torch.memory_format, meta: dict[str, Any] | None = None) -> fx.Node:
    """Insert a copy of a node's output before another node, with that node's metadata."""
    with node.graph.inserting_before(before):
        copy = node.graph.call_function(_aten.clone.default, (node,), {"memory_format": layout})
    copy.meta = {**(before.meta if meta is None else meta)}
    copy.meta["val"] = _aten.clone.default(node.meta["val"], memory_format=layout)
    return copy


def hold_masks_as_bytes(graph: fx.Graph) -> None:
    """Store dropout masks on a CPU as bytes, and mark them to be kept.

    Booleans are written one by one (torch 2.13): a softmax and its dropout mask take 13 ms for 2 million elements, with
    the mask in bytes of 0 and 1 1.3 ms, and without it 1.1 ms. Values are the same, bit for bit.

    The random numbers that they are compared from, and would be recomputed from, take four times as much memory.
    """
    for mask in graph.find_nodes(op="call_function", target=_aten.gt.Scalar):
        drawn = mask.args[0]
        is_drawn = isinstance(drawn, fx.Node) and str(drawn.target) == _DRAWS and mask.meta["val"].device == _CPU
        if is_drawn and all(_takes_numbers(user, mask) for user in mask.users):
            mark_kept(_hold(mask))


def _takes_numbers(user: fx.Node, mask: fx.Node) -> bool:
    """Tell whether a node multiplies by a mask, or converts it to numbers."""
    if user.target is _prims.convert_element_type.default:
        return bool(user.args[1].is_floating_point)  # type: ignore[union-attr]
    others = [given for given in user.args if given is not mask]
    product = user.target is _aten.mul.Tensor and len(others) == 1 and isinstance(others[0], fx.Node)
    return product and bool(others[0].meta["val"].is_floating_point())  # type: ignore[union-attr]


def _hold(mask: fx.Node) -> fx.Node:
    users = list(mask.users)
    with mask.graph.inserting_before(mask.next):
        one, zero = (
            _call(mask, _aten.full.default, [], value, dtype=torch.float32, device=_CPU) for value in (1.0, 0.0)
        )
        numbers = _call(mask, _aten.where.self, mask, one, zero)
        held = _call(mask, _prims.convert_element_type.default, numbers, torch.uint8)
    for user in users:
        if user.target is _prims.convert_element_type.default:
            user.replace_input_with(mask, held)
            continue
        with mask.graph.inserting_before(user):
            (factor,) = [given for given in user.args if given is not mask]
            converted = _call(user, _prims.convert_element_type.default, held, factor.meta["val"].dtype)  # type: ignore[union-attr]
        user.replace_input_with(mask, converted)
    return held


def _call(like: fx.Node, func: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with another node's metadata."""
    node = like.graph.call_function(func, args, kwargs)
    node.meta = {**like.meta}
    with like.meta["val"].fake_mode:
        node.meta["val"] = func(*fx.map_arg(args, lambda given: given.meta["val"]), **kwargs)
    return node

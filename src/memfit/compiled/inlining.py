"""Values inside fused forward kernels that the backward pass recomputes rather than reads from memory.

Saving them would take memory and time, and backward kernels can compute them from tensors in memory. Values far smaller
than their inputs (statistics) are saved all the same, and so are values that need much larger inputs saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from memfit.compiled.fusion import COMPUTED_FOR_EACH, INLINED, computed_of, is_slow, is_written_between
from memfit.compiled.joint_graph import JointGraph
from memfit.ir.operator_classes import COPIES, ELEMENTWISE, VIEWS, operator_class

_SMALL = 8
_WORTH = 1.25
_FEW = 24


def inlined_nodes(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the forward nodes whose values the backward pass recomputes where it needs them."""
    size, births = joint.nbytes, [storage.birth for storage in joint.trace.storages]
    crossing = {save.storage for save in joint.trace.saves}
    inside = {
        s for s in _unwritten(joint) if _SMALL * size[s] > max(map(size.__getitem__, _inputs_of(joint, s)), default=0)
    }
    taken = crossing - inside
    for storage in sorted(crossing & inside):
        needed = {s for s in _boundary(joint, storage, inside) if births[s] >= 0}
        if sum(size[s] for s in needed - taken) > _WORTH * size[storage]:
            inside.discard(storage)
            needed = {storage}
        taken |= needed
    forward = (node for nodes in joint.ops for node in nodes if node not in joint.call_of)
    return frozenset(n for n in forward if joint.storages[n] and inside.issuperset(joint.storages[n]))


def users_by_call(joint: JointGraph) -> Iterator[frozenset[fx.Node]]:
    """Yield the backward nodes that differentiate each call."""
    by_call: dict[int, list[fx.Node]] = defaultdict(list)
    for node, call in joint.call_of.items():
        by_call[call].append(node)
    for nodes in by_call.values():
        yield frozenset(nodes)


def computed_per_loop(joint: JointGraph) -> Iterator[tuple[fx.Node, frozenset[fx.Node]]]:
    """Yield backward nodes that are fast to compute in each loop that reads them, rather than written to memory.

    With each come the nodes of its kernel that it is computed from. The gradient of logits, for one, has such a node as
    large as the logits.
    """
    for index, nodes in enumerate(joint.ops):
        kernel = frozenset(nodes)
        for node in nodes:
            written = any(joint.trace.storages[s].death > index for s in joint.storages[node])
            if node in joint.call_of and not written and is_written_between(node, kernel):
                computed = frozenset(computed_of(node, kernel))
                if len(computed) <= _FEW and not is_slow(computed) and all(map(_is_copyable, computed)):
                    yield node, computed


def _is_copyable(node: fx.Node) -> bool:
    name = str(node.target)
    return operator_class(name) in (ELEMENTWISE, COPIES, VIEWS) or name.startswith("prims.")


def mark_inlined(node: fx.Node, before: fx.Node, _: tuple[str, ...]) -> None:
    """Assign a copy to the call and the kernel of the backward node that it is made for."""
    node.meta["seq_nr"] = before.meta.get("seq_nr", -1)
    node.meta[INLINED] = True


def mark_for_each(node: fx.Node) -> None:
    """Mark a node that its kernel computes in each loop that reads it."""
    node.meta[COMPUTED_FOR_EACH] = True


def _unwritten(joint: JointGraph) -> set[int]:
    """Return the storages that only the forward kernel that makes them reads."""
    written, candidates = set(joint.returned), set[int]()
    for index, (op, nodes) in enumerate(zip(joint.trace.ops, joint.ops, strict=True)):
        if op.phase != "forward":
            break
        for node in nodes:
            made = {s for s in joint.storages[node] if joint.trace.storages[s].birth == index}
            candidates |= made if node not in joint.fixed and len(nodes) > 1 else set()
            read = {s for given in node.all_input_nodes for s in joint.storages[given]}
            written |= {s for s in read if joint.trace.storages[s].birth != index}
    return candidates - written


def _inputs_of(joint: JointGraph, storage: int) -> set[int]:
    return {s for given in joint.makers[storage].all_input_nodes for s in joint.storages[given]}


def _boundary(joint: JointGraph, storage: int, inside: set[int]) -> set[int]:
    """Return the storages that a storage is recomputed from and that are not recomputed themselves."""
    needed, waiting = set[int](), [storage]
    while waiting:
        for given in _inputs_of(joint, waiting.pop()) - needed:
            needed.add(given)
            waiting += [given] if given in inside else []
    return needed - inside

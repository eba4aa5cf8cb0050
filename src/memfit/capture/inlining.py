"""What a fused kernel of the forward pass computes and does not write: better computed again than saved.

Written for the backward pass, it would take memory and time; the kernel that needs it in the backward pass can compute
it from what is in memory anyway. Two things are saved all the same: what is far smaller than what it is
computed of, as statistics are, and what would make much more be saved in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from memfit.capture.fusion import COMPUTED_FOR_EACH, INLINED, computed_of, is_slow, is_written_between
from memfit.capture.joint import Joint
from memfit.ir.operators import COPIES, ELEMENTWISE, VIEWS, operator_class

_SMALL = 8
_WORTH = 1.25
_FEW = 24


def inlined(joint: Joint) -> frozenset[fx.Node]:
    """Return the forward nodes of which the backward pass should compute the values that it needs."""
    size, births = joint.nbytes, [storage.birth for storage in joint.trace.storages]
    crossing = {save.storage for save in joint.trace.saves}
    inside = {
        s for s in _unwritten(joint) if _SMALL * size[s] > max(map(size.__getitem__, _given(joint, s)), default=0)
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


def users_by_call(joint: Joint) -> Iterator[frozenset[fx.Node]]:
    """Yield the nodes of the backward pass, those that differentiate one call at a time."""
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node, call in joint.call_of.items():
        found[call].append(node)
    for nodes in found.values():
        yield frozenset(nodes)


def reduced_too(joint: Joint) -> Iterator[tuple[fx.Node, frozenset[fx.Node]]]:
    """Yield what kernels of the backward pass would write down in between but can compute fast for each who takes it.

    Of the gradient of logits, for one, that is a tensor as large as they are.

    Yields:
        A node, and all of its kernel that it is computed of.
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
    """Let a copy count for the call of the backward node that it is made for, and run in its kernel."""
    node.meta["seq_nr"] = before.meta.get("seq_nr", -1)
    node.meta[INLINED] = True


def mark_for_each(node: fx.Node) -> None:
    """Say of a node that its kernel computes it once for each loop that takes it."""
    node.meta[COMPUTED_FOR_EACH] = True


def _unwritten(joint: Joint) -> set[int]:
    """Return the storages that only the forward kernel which makes them takes."""
    written, found = set(joint.returned), set[int]()
    for index, (op, nodes) in enumerate(zip(joint.trace.ops, joint.ops, strict=True)):
        if op.phase != "forward":
            break
        for node in nodes:
            made = {s for s in joint.storages[node] if joint.trace.storages[s].birth == index}
            found |= made if node not in joint.fixed and len(nodes) > 1 else set()
            written |= {s for g in node.all_input_nodes for s in joint.storages[g]} - joint.made_by(index)
    return found - written


def _given(joint: Joint, storage: int) -> set[int]:
    return {s for given in joint.makers[storage].all_input_nodes for s in joint.storages[given]}


def _boundary(joint: Joint, storage: int, inside: set[int]) -> set[int]:
    """Return what a storage is computed of that is not computed again itself."""
    found, waiting = set[int](), [storage]
    while waiting:
        for given in _given(joint, waiting.pop()) - found:
            found.add(given)
            waiting += [given] if given in inside else []
    return found - inside

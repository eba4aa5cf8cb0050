"""The grouping of a step's modules and gradients for sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memfit.ir import Trace, enclosing

_CONTAINERS = ("ModuleList", "Sequential")


def repeated_blocks(trace: Trace) -> tuple[str, ...]:
    """Return the FQNs of a model's repeated blocks.

    They are the outermost called children of a ModuleList or Sequential that have parameters and a sibling of their
    class.
    """
    kinds = {module.fqn: module.kind for module in trace.modules}
    called = {trace.fqn_of(index) for index, call in enumerate(trace.calls) if call.phase == "forward"}
    siblings: dict[tuple[str, str], int] = defaultdict(int)
    for fqn, kind in kinds.items():
        siblings[_parent(fqn), kind] += 1
    filled = {fqn for parameter in trace.parameters for fqn in enclosing(parameter.fqn)}
    blocks: list[str] = []
    for fqn, kind in kinds.items():
        listed = fqn in called and kinds.get(_parent(fqn)) in _CONTAINERS and siblings[_parent(fqn), kind] > 1
        if fqn and listed and fqn in filled and enclosing(fqn).isdisjoint(blocks):
            blocks.append(fqn)
    return tuple(blocks)


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def innermost(fqn: str, units: Iterable[str]) -> str:
    """Return the innermost unit that contains a module or parameter."""
    return max(enclosing(fqn).intersection(units), key=len)


def around(units: Iterable[str]) -> frozenset[str]:
    """Return the modules that hold a unit: recomputing one would gather its units once more."""
    return frozenset(fqn for unit in units for fqn in enclosing(unit) if fqn != unit)


def gradients_by_parameter(trace: Trace) -> dict[int, int]:
    """Return the storages of gradients by parameter, in the order in which they become ready."""
    births = [(s.birth, i) for i, s in enumerate(trace.storages) if s.category == "gradients" and s.parameter >= 0]
    return {trace.storages[index].parameter: index for _, index in sorted(births)}

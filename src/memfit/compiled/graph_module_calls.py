"""Module calls in a traced graph, from its nodes' module stacks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import fx

from memfit.ir.trace import Call, Module

_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")


class CallNames:
    """Counts the calls of each module, in all graphs of a function: further ones have "@1", "@2" after their FQN."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = Counter(counts)

    def copy(self) -> CallNames:
        """Return the same counts, to go on with by themselves."""
        return CallNames(self._counts)

    def next(self, fqn: str) -> str:
        """Return the name of one more call of a module."""
        times = self._counts[fqn]
        self._counts[fqn] += 1
        return f"{fqn}@{times}" if times else fqn


class ModuleCalls:
    """The module calls of a forward pass.

    Each call of a module, and each part that other operators interrupt, has its own name, and can be recomputed by
    itself.

    Args:
        ops: The nodes of each operator, in order; a kernel's nodes are all of one module.
        names: The names of the calls before, which is changed.

    Attributes:
        modules: A module for each call.
        calls: The calls, without their input storages.
        of_op: For each operator, the innermost call, or -1.
    """

    def __init__(self, ops: Iterable[Sequence[fx.Node]], names: CallNames) -> None:
        self.modules: list[Module] = []
        self.calls: list[Call] = []
        self.of_op: list[int] = []
        self._names = names
        self._of_sequence: dict[int, int] = {}
        open_calls: list[tuple[str, int]] = []
        for index, nodes in enumerate(ops):
            stack = module_stack(nodes[0])
            same = sum(1 for _ in itertools.takewhile(lambda p: p[0][0] == p[1], zip(open_calls, stack, strict=False)))
            del open_calls[same:]
            for key in stack[same:]:
                open_calls.append((key, self._enter(key, open_calls[-1][1] if open_calls else -1, index)))
            for _, call in open_calls:
                self.calls[call] = replace(self.calls[call], end=index + 1)
            current = open_calls[-1][1] if open_calls else -1
            self.of_op.append(current)
            for node in nodes:
                if (number := node.meta.get("seq_nr")) is not None:
                    self._of_sequence.setdefault(number, current)

    def _enter(self, key: str, parent: int, index: int) -> int:
        fqn = key.split("\0")[0]
        self.modules.append(Module(self._names.next(fqn), key.split("\0")[1], False, False))
        self.calls.append(Call(len(self.modules) - 1, parent, 0, index, index, (), "forward"))
        return len(self.calls) - 1

    def of_gradient(self, node: fx.Node) -> int:
        """Return the call whose forward operator a backward node differentiates, or -1."""
        return self._of_sequence.get(node.meta.get("seq_nr", -1), -1)


def module_stack(node: fx.Node) -> list[str]:
    """Return the modules that a node was traced in, outermost first, without the model: FQN, class and key."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    entries = []
    for key, (path, kind) in stack.items():
        # A path is such as "L['self'].blocks.0".
        fqn = _INDEX.sub(r".\1", path.removeprefix("L").replace("_modules", "")).strip(".").partition(".")[2]
        if fqn:
            name = kind if isinstance(kind, str) else kind.__name__
            entries.append("\0".join((fqn, name.rsplit(".", 1)[-1], key)))
    return entries

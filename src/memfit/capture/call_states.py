"""Changes of the state that modules read, from their calls to the backward pass, where a recomputation would run."""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit.held_state import Place, Reader


class CallStates:
    """States of the places that modules read, noted as calls begin and compared before the backward pass.

    A call reads the places of its module and of its submodules. Equal states of a place are noted once.
    """

    def __init__(self, model: nn.Module) -> None:
        reader = Reader()
        own = {module: reader.places(fqn, module) for fqn, module in model.named_modules()}
        hooks = {module: reader.hooks(module) for module in own}
        self._places: list[Place] = []
        self._seen: list[list[dict[str, Any]]] = []
        self._number: dict[int, int] = {}
        self._of_module: dict[nn.Module, list[int]] = {}
        for module in own:
            inside = [place for inner in module.modules() if inner is not module for place in own[inner] + hooks[inner]]
            self._of_module[module] = list(dict.fromkeys(map(self._numbered, [*own[module], *inside])))
        self._calls: dict[int, list[tuple[int, int]]] = {}

    def _numbered(self, place: Place) -> int:
        if id(place) not in self._number:
            self._number[id(place)] = len(self._places)
            self._places.append(place)
            self._seen.append([place.read()])
        return self._number[id(place)]

    def begin(self, call: int, module: nn.Module) -> None:
        """Note the states of the places that a call's module reads, as the call begins."""
        self._calls[call] = [(number, self._now(number)) for number in self._of_module[module]]

    def _now(self, number: int) -> int:
        """Return the index of a place's present state among those that it had."""
        state, seen = self._places[number].read(), self._seen[number]
        if state != seen[-1]:
            seen.append(state)
        return len(seen) - 1

    def changes(self) -> dict[int, str]:
        """Return the name of a changed value for each call that read one; forget these calls."""
        now = {number: self._now(number) for noted in self._calls.values() for number, _ in noted}
        changed: dict[int, str] = {}
        for call, noted in self._calls.items():
            for number, before in noted:
                if before == now[number]:
                    continue
                then, present = self._seen[number][before], self._seen[number][now[number]]
                name = next((n for n in then.keys() | present.keys() if then.get(n) != present.get(n)), None)
                if name is not None:
                    changed[call] = f"{name} of {self._places[number].owner}"
                    break
        self._calls.clear()
        return changed

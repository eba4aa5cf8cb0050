"""Lean modules: normalisations, activations and dropouts whose outputs are made again in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from msgspec.structs import replace
from torch import nn

from memfit.capture import is_compiled
from memfit.foundations import format_bytes
from memfit.ir import Levers, Trace
from memfit.levers.lever import Lever, LeversOn, NotOffered, Rung, Setting, least_bytes
from memfit.recomputation import is_lean, is_made_lean, lean
from memfit.workload import Workload

LEAN = "lean norms and activations"
_ALL = ("*",)


class Lean(Lever):
    """Normalisations and activations that keep their inputs, not their outputs."""

    name = LEAN
    field = "lean"
    switchable = True
    recomputes = True

    def setting(self, on: LeversOn) -> str:
        return f"outputs of {'all' if '*' in on.levers.lean else ', '.join(on.levers.lean)} recomputed, inputs kept"

    def brief(self, on: LeversOn) -> str:
        return "norms recomputed"

    def on_model(self, levers: Levers, model: nn.Module) -> AbstractContextManager[None]:
        return lean(model, levers.lean)

    def is_applied(self, workload: Workload) -> bool:
        return is_made_lean(workload.model)

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        self._check(step)
        whole = replace(step.plain, lean=_ALL)
        saved_bytes = step.predicted(step.plain).peak_bytes - step.predicted(whole).peak_bytes
        if saved_bytes < least_bytes(step) and not step.tries_all:
            raise NotOffered(f"it lowers the peak by less than {format_bytes(least_bytes(step))}")
        lean = [replace(levers, lean=_ALL) for levers in wanted if step.allows(levers)]
        if not step.tries_all and any(levers.chunked_loss for levers in lean):  # whole losses are there to compare
            lean = [levers for levers in lean if levers.chunked_loss]
        return [*wanted, *lean]

    def rungs(self) -> Mapping[str, Rung]:
        return {self.name: self._rung}

    def _rung(self, step: Setting, levers: Levers) -> tuple[Levers, str]:
        self._check(step)
        count = sum(is_lean(module) for module in step.workload.model.modules())
        return replace(levers, lean=_ALL), f"{count} modules recomputed"

    def _check(self, step: Setting) -> None:
        if not worthwhile(step.workload, step.trace(step.plain), least_bytes(step)):
            raise NotOffered(f"norms, activations and dropouts keep less than {format_bytes(least_bytes(step))}")


def worthwhile(workload: Workload, trace: Trace, least_bytes: float) -> bool:
    """Tell whether a step's normalisations, activations and dropouts make so many bytes for its backward pass."""
    names = {fqn for fqn, module in workload.model.named_modules() if is_lean(module)}
    kept_bytes = sum(
        storage.nbytes
        for storage in trace.storages
        if storage.category == "activations"
        and trace.ops[storage.birth].phase == "forward"
        and trace.fqn_of(trace.ops[storage.birth].call) in names
    )
    return kept_bytes > 0 and kept_bytes >= least_bytes and not is_compiled(workload)

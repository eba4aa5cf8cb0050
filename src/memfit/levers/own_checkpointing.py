"""The gradient checkpointing that a user switched on in a model of transformers: off, so that regions may be chosen.

`model.gradient_checkpointing_enable()` gives every layer a function that the layer calls itself by. Under this lever
that function is a plain call. Everything else stays as the user has it: the layers still leave their cache out, and the
hook that makes the embedding's output require gradients is where it was. So the step computes what it did, once.

Checkpoints that `torch.utils.checkpoint` makes in a model's own code have no such switch, and stay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace
from torch import nn

from memfit.errors import PlanError
from memfit.foundations import format_bytes, format_seconds
from memfit.ir import Levers
from memfit.levers.lever import Lever, LeversOn, NotOffered, Setting
from memfit.workload import Workload

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"  # as transformers calls them


class OwnCheckpointing(Lever):
    """The model's own gradient checkpointing, switched off."""

    name = "own gradient checkpointing"
    field = "own_checkpointing"
    switchable = True
    frees_modules = True

    def words(self, on: LeversOn) -> tuple[str, str]:
        return "switched off: the plan's regions replace it", "own checkpointing off"

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have the layers of a model call themselves, until the context is left; none where none is switched on.

        Raises:
            PlanError: Their checkpointing can't be switched off with the same numbers.
        """
        modules = [module for module in model.modules() if _is_on(module)]
        if why := next(filter(None, map(_why_not, modules)), ""):
            raise PlanError(
                f"levers.own_checkpointing is 'off', and the model's own gradient checkpointing has to stay on: {why}."
                " Or set levers.own_checkpointing to 'as-is', and plan anew"
            )
        for module in modules:
            setattr(module, _FUNCTION, _Called(getattr(module, _FUNCTION)))
        try:
            yield
        finally:
            for module in modules:
                if isinstance(called := module.__dict__.get(_FUNCTION), _Called):  # or it was set anew meanwhile
                    setattr(module, _FUNCTION, called.before)

    def is_applied(self, workload: Workload) -> bool:
        return any(isinstance(module.__dict__.get(_FUNCTION), _Called) for module in workload.model.modules())

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        """Search regions in its place; the step as it is stays to compare, and all are tried before nothing fits."""
        modules = [module for module in step.workload.model.modules() if _is_on(module)]
        if not modules or not any(call.phase == "recompute" for call in step.trace(step.plain).calls):
            raise NotOffered("no layer is checkpointed by a switch of transformers")
        if why := next(filter(None, map(_why_not, modules)), ""):
            raise NotOffered(f"the model's own gradient checkpointing stays on: {why}", is_noted=True)
        step.trace(replace(step.plain, own_checkpointing="off"))  # not offered where it can't be captured
        # Code compiled once more takes longer than most steps save: compiled steps keep the user's checkpoints.
        freed = [levers for levers in wanted if step.allows(levers) and levers.compiler == "none"]
        kept = [x for x in wanted if step.tries_all or x == step.plain or x not in freed]
        return [*kept, *(replace(levers, own_checkpointing="off") for levers in freed)]

    def notes(self, step: Setting, levers: Levers) -> list[str]:
        """Tell what the user's checkpointing costs, and what it saves."""
        own, off = step.predicted(step.plain), step.predicted(replace(step.plain, own_checkpointing="off"))
        return [
            "the model's own gradient checkpointing is switched off while the plan is applied, with the same numbers:"
            f" with it a step is predicted to take {format_seconds(own.step_seconds)} and hold"
            f" {format_bytes(own.peak_bytes)}; with nothing recomputed {format_seconds(off.step_seconds)} and"
            f" {format_bytes(off.peak_bytes)}"
        ]


class _Called:
    """A plain call in the place of a checkpointed one. It copies with its module (`copy.deepcopy`)."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _is_on(module: nn.Module) -> bool:
    """Tell whether a module of transformers has its checkpointing switched on."""
    return getattr(module, _FLAG, False) is True and callable(module.__dict__.get(_FUNCTION))


def _why_not(module: nn.Module) -> str:
    """Return why a module's checkpointing can't be switched off with the same numbers; "" where it can."""
    function = module.__dict__[_FUNCTION]
    options = function.keywords if isinstance(function, functools.partial) else {}
    advice = "call gradient_checkpointing_enable({'use_reentrant': False}) to have memfit choose"
    if options.get("use_reentrant", True) is not False:
        return f"it is reentrant, and adds gradients up in another order: {advice}"
    if not options.get("preserve_rng_state", True):
        return f"its second run draws other random numbers (preserve_rng_state=False): {advice}"
    return ""

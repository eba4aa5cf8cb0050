"""What all verbs share: their first arguments are checked, they run one at a time, and they end at safe points."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.foundations import held_back, public, turn
from memfit.ir import Plan
from memfit.training import Step
from memfit.workload import Workload, described, generators_of_turn

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=Step)
_LIKELY = {"budget": 'budget="90%"', "out": 'out="run"', "steps": "steps=10_000", "run": '"run"'}
_WORKLOAD = "memfit.Workload(model, batch, loss_fn, optimizer)"


def _run_in(
    *contexts: Callable[[], contextlib.AbstractContextManager[object]],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: its functions run in these contexts."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                return function(*args, **kwargs)

        return run

    return decorate


verb = _run_in(functools.partial(held_back, ends_steps=True), turn, generators_of_turn)
"""Make a function a verb.

A verb in another thread waits until it is done. A signal whose handler raises ends it at a safe point
(`memfit.foundations.interrupts`). In a process with several threads it draws from generators of its own.
"""
uninterrupted = _run_in(held_back)
"""Make signals end a function at a safe point alone; other threads may run verbs meanwhile."""


def applying(function: Callable[_P, _S]) -> Callable[_P, _S]:
    """Make a function that applies a plan a verb, with the global generators: what it draws is the user's.

    Where a signal ends it after all was done, the plan is taken back: nobody has the step to close.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _S:
        step: _S | None = None
        try:
            with held_back(), turn():
                step = function(*args, **kwargs)
        except BaseException:
            if step is not None:
                step.close()
            raise
        return step

    return run


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function `public`, with its arguments checked: their number, their names, and the kinds of the first."""
    signature = inspect.signature(function)
    verb = "tools." * function.__module__.startswith("memfit.tools.") + function.__name__
    return public(function, functools.partial(_check, verb, signature))


def plan_given(plan: Plan | Path | str | None) -> Plan | None:
    """Return a plan that an argument holds, or names the file of."""
    return Plan.load(plan) if isinstance(plan, str | Path) else plan


def _check(verb: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    parameters = list(signature.parameters.values())
    first = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    empty = inspect.Parameter.empty
    # A call names the other parameters that it needs; a budget also where another may stand for it.
    required = [
        each.name for each in parameters if each.default is empty or (each.name == "budget" and each.default is None)
    ]
    needed = [name for name in required if name not in first]
    given = dict(zip(first, args, strict=False)) | {name: kwargs[name] for name in first if name in kwargs}
    wrong = {name: value for name, value in given.items() if name in _KINDS and not _KINDS[name].fits(value)}

    def call(**instead: str) -> str:
        parts = [instead.get(name, _LIKELY.get(name, name)) for name in first if name in (*given, *_KINDS)]
        return f"memfit.{verb}({', '.join([*parts, *(_LIKELY.get(name, f'{name}=...') for name in needed)])})"

    for name, value in wrong.items():
        for other in wrong:
            if other != name and _KINDS[other].fits(value):
                raise UsageError(
                    f"{name} is {described(value)}, and {other} is {described(given[other])}: write {call()} in this"
                    " order"
                )
        write = f"write {call()}. If a function made it, end that function with `return {name}`"
        if value is not None:
            write = f"write {call(**{name: _KINDS[name].instead(value)})}"
        raise UsageError(f"{name} is {described(value)}, not {_KINDS[name].noun}: {write}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise UsageError(f"memfit.{verb}: {e}. Write {call()}") from None


def _workload_instead(value: Any) -> str:
    if isinstance(value, str) and ":" in value:
        return f"memfit.load_workload({value!r})"
    return f"{value.__name__}()" if inspect.isfunction(value) and value.__name__ != "<lambda>" else _WORKLOAD


def _plan_instead(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return f"memfit.Plan.load({os.fspath(value)!r})"
    return "memfit.Plan.load(path)" if isinstance(value, Mapping) else 'memfit.plan(workload, budget="90%")'


def _optimizer_instead(value: Any) -> str:
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler.optimizer"
    return f"{value.__name__ if isinstance(value, type) else 'torch.optim.AdamW'}(model.parameters())"


def _are(kind: type, value: Any) -> bool:
    """Tell whether a value is of a kind, or a sequence of such."""
    values = value if isinstance(value, list | tuple) else [value]
    return bool(values) and all(isinstance(each, kind) for each in values)


class _Kind(NamedTuple):
    noun: str
    fits: Callable[[Any], bool]
    instead: Callable[[Any], str]  # what to type in the place of a wrong one


_KINDS = {
    "workload": _Kind("a memfit.Workload", lambda value: isinstance(value, Workload), _workload_instead),
    "plan": _Kind("a memfit.Plan", lambda value: isinstance(value, Plan), _plan_instead),
    "run": _Kind("the folder of a run", lambda value: isinstance(value, str | os.PathLike), lambda value: '"run"'),
    "model": _Kind(
        "a torch.nn.Module",
        functools.partial(_are, nn.Module),
        lambda value: "workload.model" if isinstance(value, Workload) else "model",
    ),
    "optimizer": _Kind("a torch.optim.Optimizer", functools.partial(_are, torch.optim.Optimizer), _optimizer_instead),
}
"""The arguments that are checked, by name, wherever they are first ones."""

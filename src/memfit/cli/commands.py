"""Commands with the option `--traceback`, which shows errors with all frames instead of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from memfit.cli import threads

is_whole = False
"""Whether an error is shown with all of its frames, memfit's too."""

_OPTION = typer.Option("--traceback", help="Show an error's whole traceback, memfit's frames too.")


class Commands(typer.Typer):
    """A command line whose commands all take `--traceback`."""

    def command(  # type: ignore[override]  # Typer spells out every option
        self, name: str | None = None, *, runs_steps: bool = False, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function a command of this command line.

        Args:
            runs_steps: Whether it runs steps on this machine: how their threads wait is settled first.
        """
        register = super().command(name, **options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_traceback(_with_threads(function) if runs_steps else function))
            return function

        return decorate


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        threads.settle()
        return function(*args, **kwargs)

    return call


def _with_traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the option in its signature, where Typer reads it."""

    @functools.wraps(function)
    def call(*args: Any, traceback: bool, **kwargs: Any) -> Any:
        global is_whole
        is_whole = traceback
        return function(*args, **kwargs)

    signature = inspect.signature(function, eval_str=True)
    hint = Annotated[bool, _OPTION]
    more = inspect.Parameter("traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hint)
    vars(call)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), more])
    call.__annotations__ = {**function.__annotations__, "traceback": hint}
    return call

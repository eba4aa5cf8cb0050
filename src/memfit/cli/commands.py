"""Commands with the options `--quiet` and `--traceback`, whose errors and interrupts are told in their words."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from msgspec.structs import replace

from memfit.cli import output
from memfit.foundations import Words, options
from memfit.hardware import is_busy

if TYPE_CHECKING:
    from memfit.ir import Fleet, Plan, Prediction

_Noted = TypeVar("_Noted", "Plan", "Prediction", "Fleet")

WAIT_POLICY = "OMP_WAIT_POLICY"
"""The environment variable by which threads of PyTorch sleep while they wait for one another, where it is PASSIVE."""
_OTHER_POLICIES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")

is_whole = False
"""Whether an error is shown with all of its frames, memfit's too."""
words = Words({})
"""The words of the command that runs: its options."""

_QUIET = typer.Option("--quiet", "-q", help="Print the result and errors, without progress and notes.")
_TRACEBACK = typer.Option("--traceback", help="Show the whole traceback of an error, with memfit's own frames.")
_NOTHING_LEFT = "nothing was written; run the same command again"


class Commands(typer.Typer):
    """A command line whose commands all take `--quiet` and `--traceback`."""

    def command(  # type: ignore[override]  # Typer spells out every option
        self, name: str | None = None, *, runs_steps: bool = False, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function a command of this command line.

        Args:
            runs_steps: Whether it runs steps on this machine: how their threads wait is settled first.
        """
        register = super().command(name, **options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_options(_interruptible(_with_threads(function) if runs_steps else function)))
            return function

        return decorate


def with_options(found: _Noted) -> _Noted:
    """Return a record whose notes name the options of the command that runs."""
    return replace(found, notes=[words.of(note) for note in found.notes])


def print_ended(what: str, error: BaseException) -> None:
    """Print in one line the signal that ended a command, the work that is left, and the next command."""
    notes = [words.of(note.removeprefix("memfit: ")) for note in getattr(error, "__notes__", [_NOTHING_LEFT])]
    output.err.print("; ".join([what, *notes]), highlight=False, markup=False, soft_wrap=True)


def _interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that tells of Ctrl-C and exits with status 130: Typer would exit without a word."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt as e:
            print_ended("interrupted", e)
            raise SystemExit(130) from None

    return call


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        settle_threads()
        return function(*args, **kwargs)

    return call


def settle_threads() -> None:
    """Have threads that wait sleep at once on a busy machine; call it before PyTorch is imported, which reads it.

    GNU OpenMP's threads wait for the next parallel operator by computing, for some milliseconds, and sleep then
    (libgomp, "GOMP_SPINCOUNT"). On a machine at rest that is right: a step of many small operators takes longer where
    they sleep at once. On a busy one, each wait takes the time of a processor that other programs use. What the user
    has set in the environment stays.
    """
    is_set = any(name in os.environ for name in (WAIT_POLICY, *_OTHER_POLICIES))
    if not is_set and "torch" not in sys.modules and is_busy():
        os.environ[WAIT_POLICY] = "PASSIVE"


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with both options in its signature, where Typer reads it, and errors in its command's words."""
    signature = inspect.signature(function, eval_str=True)
    known = [name for name, parameter in signature.parameters.items() if parameter.annotation is typer.Context]

    @functools.wraps(function)
    def call(*args: Any, quiet: bool, traceback: bool, **kwargs: Any) -> Any:
        global is_whole, words
        is_whole, output.is_quiet = traceback, quiet
        context = kwargs[known[0]] if known else kwargs.pop("context")  # Typer gives it once
        given = [p for p in context.command.params if p.name and p.opts[0].startswith("-")]
        words = options({str(p.name): max(p.opts, key=len) for p in given})
        with words.spoken():
            return function(*args, **kwargs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, keyword, default=False, annotation=Annotated[bool, option])
        for name, option in (("quiet", _QUIET), ("traceback", _TRACEBACK))
    ]
    if not known:
        more.append(inspect.Parameter("context", keyword, annotation=typer.Context))
    vars(call)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *more])
    call.__annotations__ = {**function.__annotations__, **{p.name: p.annotation for p in more}}
    return call

"""Commands whose options stand in records, and that all take `--quiet` and `--traceback`.

Their errors and interrupts are told in their words.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from msgspec.structs import replace

from memfit import hardware
from memfit.cli import output
from memfit.foundations import FIELDS, CommandOption, Words, options

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


class After(NamedTuple):
    """Says after which option the options of a command's parameter stand (`Annotated[RunOptions, After("budget")]`)."""

    option: str


class Commands(typer.Typer):
    """A command line whose commands all take `--quiet` and `--traceback`."""

    def command(  # type: ignore[override]  # Typer spells out every option
        self, name: str | None = None, *, runs_steps: bool = False, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function a command of this command line.

        A parameter that is a record has an option for each field with an `CommandOption`, and gets the record.

        Args:
            runs_steps: Whether it runs steps on this machine: how their threads wait is settled first.
        """
        register = super().command(name, **options)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_options(function, runs_steps))
            return function

        return decorate


def with_options(found: _Noted) -> _Noted:
    """Return a record whose notes name the options of the command that runs."""
    return replace(found, notes=[words.of(note) for note in found.notes])


def print_ended(what: str, error: BaseException) -> None:
    """Print in one line the signal that ended a command, the work that is left, and the next command."""
    notes = [words.of(note.removeprefix("memfit: ")) for note in getattr(error, "__notes__", [_NOTHING_LEFT])]
    output.tell("; ".join([what, *notes]), to=output.err)


def settle_threads() -> None:
    """Have threads that wait sleep at once on a busy machine; call it before PyTorch is imported, which reads it.

    GNU OpenMP's threads wait for the next parallel operator by computing, for some milliseconds, and sleep then
    (libgomp, "GOMP_SPINCOUNT"). On a machine at rest that is right: a step of many small operators takes longer where
    they sleep at once. On a busy one, each wait takes the time of a processor that other programs use. What the user
    has set in the environment stays.
    """
    is_set = any(name in os.environ for name in (WAIT_POLICY, *_OTHER_POLICIES))
    if not is_set and "torch" not in sys.modules and hardware.is_busy():
        os.environ[WAIT_POLICY] = "PASSIVE"


def _with_options(function: Callable[..., Any], runs_steps: bool) -> Callable[..., Any]:
    """Return a function as Typer is to call it: its options one by one, and errors in its command's words.

    Ctrl-C is told, with status 130: Typer would exit without a word.
    """
    given = inspect.signature(function, eval_str=True).parameters.values()
    known = [parameter.name for parameter in given if parameter.annotation is typer.Context]
    records: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in given:
        kind, *more = get_args(parameter.annotation) or (parameter.annotation,)
        if dataclasses.is_dataclass(kind):
            records[parameter.name] = kind
            own = [_parameter_of(*each) for each in _options_of(kind)]
        elif parameter.name in known:
            own = [parameter]
        else:
            for_typer = [each for each in more if not isinstance(each, After)]
            own = [parameter.replace(annotation=Annotated[(_read_as(kind), *for_typer)])]
        names = [each.name for each in shown]
        at = next((names.index(each.option) + 1 for each in more if isinstance(each, After)), len(shown))
        shown[at:at] = own
    for name, option in (("quiet", _QUIET), ("traceback", _TRACEBACK)):
        shown.append(inspect.Parameter(name, _KEYWORD, default=False, annotation=Annotated[bool, option]))
    if not known:
        shown.append(inspect.Parameter("context", _KEYWORD, annotation=typer.Context))

    @functools.wraps(function)
    def call(*, quiet: bool, traceback: bool, **values: Any) -> Any:
        global is_whole, words
        is_whole, output.is_quiet = traceback, quiet
        context = values[known[0]] if known else values.pop("context")  # Typer gives it once
        asked = [p for p in context.command.params if p.name and p.opts[0].startswith("-")]
        words = options({str(p.name): max(p.opts, key=len) for p in asked})
        values = {name: _plain(value) for name, value in values.items()}
        for name, record in records.items():
            of_fields = {}
            for field, option, _ in _options_of(record):
                value = values.pop(option.name or field.name)
                of_fields[field.name] = option.values.get(value, value) if option.values else value
            values[name] = record(**of_fields)
        try:
            if runs_steps:
                settle_threads()
            with words.spoken():
                return function(**values)
        except KeyboardInterrupt as e:
            print_ended("interrupted", e)
            raise SystemExit(130) from None

    shown = [each.replace(kind=_KEYWORD) for each in shown]
    vars(call)["__signature__"] = inspect.Signature(shown)
    call.__annotations__ = {each.name: each.annotation for each in shown}
    return call


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options_of(record: Any) -> list[tuple[dataclasses.Field[Any], CommandOption, Any]]:
    """Return the fields of a record that are options, each with its option and its type."""
    hints = get_type_hints(record, include_extras=True)
    found = [(field, hints[field.name]) for field in dataclasses.fields(record)]
    return [(field, get_args(hint)[1], get_args(hint)[0]) for field, hint in found if get_origin(hint) is Annotated]


def _parameter_of(field: dataclasses.Field[Any], option: CommandOption, hint: Any) -> inspect.Parameter:
    """Return a field's option as Typer reads it."""
    default = field.default if option.default is FIELDS else option.default
    asked = typer.Option(*option.flags, help=option.help, min=option.min, show_default=option.show_default)
    read = _read_as(hint if option.kind is FIELDS else option.kind)
    return inspect.Parameter(
        option.name or field.name,
        _KEYWORD,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[read | None if default is None else read, asked],
    )


def _read_as(kind: Any) -> Any:
    """Return the type that Typer reads for a field's: an enumeration for choices, the first of several types."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if choices := [value for each in members if get_origin(each) is Literal for value in get_args(each)]:
        enumeration: Any = enum.StrEnum
        read = enumeration("Choice", {choice: choice for choice in choices})
    elif get_origin(members[0]) is collections.abc.Sequence:
        read = types.GenericAlias(list, (_read_as(get_args(members[0])[0]),))
    else:
        read = members[0]
    return read | None if type(None) in members else read


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, enum.Enum) else value

"""The docs' pages of reference that follow from the code: the command line, the plan file, errors and exit statuses."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from benchmarks.markdown import head, row
from memfit import errors
from memfit.cli.app import app
from memfit.ir import (
    Candidate,
    ChunkedLoss,
    FrozenWeights,
    Levers,
    MeasuredStep,
    Plan,
    Prediction,
    Proof,
    Region,
    Solution,
    Throughput,
)

RECORDS: tuple[type[msgspec.Struct], ...] = (
    Plan,
    Levers,
    Region,
    ChunkedLoss,
    FrozenWeights,
    Prediction,
    Throughput,
    Solution,
    Proof,
    MeasuredStep,
    Candidate,
)
"""What a plan file holds, from the outside in."""


def commands() -> str:
    """Return every command of the command line, with its arguments and options."""
    return "\n\n".join(
        _command(name, command) for name, command in _within_group("memfit", typer.main.get_command(app))
    )


def _within_group(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    for own, command in group.commands.items():
        whole = f"{name} {own}"
        yield from _within_group(whole, command) if hasattr(command, "commands") else [(whole, command)]


def _command(name: str, command: Any) -> str:
    parameters = [p for p in command.params if p.name != "help"]
    arguments = " ".join(_placeholder(p) for p in parameters if p.param_type_name == "argument")
    usage = " ".join([name, "[OPTIONS]", *([arguments] if arguments else [])])
    lines, kinds = head(("option", "what it is", "default")), typing.get_type_hints(command.callback)
    for parameter in parameters:
        said = _escaped(f"{_sentences(parameter.help)}{_values(kinds[parameter.name])}")
        lines.append(row((_names(parameter), said, _default(parameter))))
    return "\n".join([f"## {name}", "", _sentences(command.help), "", f"```text\n{usage}\n```", "", *lines])


def _placeholder(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_placeholder(parameter)}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _values(kind: Any) -> str:
    """Return what an option takes, where that is a choice."""
    choices = [one for one in (kind, *_within(kind)) if isinstance(one, type) and issubclass(one, enum.Enum)]
    names = [f"`{value.value}`" for choice in choices for value in choice]
    return f" One of {', '.join(names)}." if names else ""


def _within(kind: Any) -> Iterator[Any]:
    for one in typing.get_args(kind):
        yield one
        yield from _within(one)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "must be given"
    value = getattr(parameter.default, "value", parameter.default)
    return "" if value in (None, False, (), []) or callable(value) else f"`{value}`"


def plan_file() -> str:
    """Return the fields of every record of a plan file, as its class describes them."""
    return "\n\n".join(_record(kind) for kind in RECORDS)


def _record(kind: type[msgspec.Struct]) -> str:
    doc = inspect.cleandoc(kind.__doc__ or "")
    said = dict(_attributes(doc))
    lines = head(("field", "type", "what it is", "default"))
    for field in msgspec.structs.fields(kind):
        default = "must be given" if field.required else f"`{_json(field)}`"
        lines.append(row((f"`{field.name}`", f"`{_type(field.type)}`", _escaped(said.get(field.name, "")), default)))
    return "\n".join([f"## {kind.__name__}", "", _sentences(doc.split("\n\n")[0]), "", *lines])


def _attributes(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions of a docstring's "Attributes"."""
    _, _, section = doc.partition("Attributes:\n")
    for name, text in re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+:|^\S|\Z)", section, flags=re.DOTALL | re.MULTILINE):
        yield name, _sentences(text)


def _json(field: msgspec.structs.FieldInfo) -> str:
    default = field.default if field.default is not msgspec.NODEFAULT else typing.cast(Any, field.default_factory)()
    return msgspec.json.encode(default).decode()


def _type(kind: Any) -> str:
    """Return a type in JSON's words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in arguments)
    if origin is typing.Literal:
        return " or ".join(f'"{one}"' for one in arguments)
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"object of {_type(arguments[1])}"
    names = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    return names.get(kind) or str(kind.__name__)


def error_table() -> str:
    """Return every error, its exit status and what it means."""
    lines = head(("error", "is a", "exit status", "what it means"))
    for kind in _tree(errors.MemfitError):
        said = _sentences(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0])
        lines.append(row((f"`{kind.__name__}`", f"`{kind.__base__.__name__}`", str(kind.exit_status), _escaped(said))))
    return "\n".join(lines)


def _tree(kind: Any) -> Iterator[Any]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _tree(below)


def _sentences(text: str | None) -> str:
    return " ".join((text or "").split())


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def rooms_table() -> str:
    """Return the rooms of the package in the order in which they import each other, as their first lines say it."""
    root = Path(__file__).parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = [name for layer in contracts[0]["layers"] for name in layer.split(" | ")]
    inits = {name: root / "src" / "memfit" / name / "__init__.py" for name in names}
    texts = {name: ast.get_docstring(ast.parse(p.read_text())) for name, p in inits.items() if p.exists()}
    lines = head(["room of `src/memfit/`", "what is in it"])
    return "\n".join([*lines, *(row([f"`{name}/`", (text or "").partition("\n")[0]]) for name, text in texts.items())])

"""Words of users: messages in those of the interface that their reader is in, and the names of their functions.

memfit's own messages name arguments of its Python functions (`budget=1.5GiB`, `Workload.batch`). On the command line
the same knob is an option, and under a trainer it is a setting of the trainer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError, WorkloadError

_ARGUMENT = re.compile(
    r"(?<![\w./-])(?:([a-z]\w*)=('[^']*'|\"[^\"]*\"|\[[^]]*\]|True\b|False\b|None\b)?|([a-z]+(?:_[a-z]+)+)\b(?![(./]))"
)
_FIELD = re.compile(r"\bWorkload\.(\w+)(=?)")


FIELDS: Any = object()
"""What the field itself says."""


@dataclass(frozen=True)
class CommandOption:
    """An option of the command line, as a record's field says it (`Annotated[int, CommandOption("Passes.", min=1)]`).

    Attributes:
        flags: The option's spellings; by default its name's.
        name: Its name, if it is not the field's.
        kind: The type of its values, if it is not the field's; of its items for `Sequence`.
        default: Its default, if it is not the field's.
        values: The field's values, by the option's, where they differ.
        min: The least number.
    """

    help: str
    flags: tuple[str, ...] = ()
    name: str = ""
    kind: Any = FIELDS
    default: Any = FIELDS
    values: Mapping[Any, Any] = field(default_factory=dict)
    min: float | None = None
    show_default: bool = True


class Words:
    """The names of an interface for memfit's arguments and for a workload's parts.

    Args:
        arguments: Names of arguments, with their own sign: `"--budget "`, `"per_device_train_batch_size="`.
        parts: Names of a workload's parts, such as `{"batch": "the batch"}`. Others keep theirs.
    """

    def __init__(self, arguments: Mapping[str, str], parts: Mapping[str, str] | None = None) -> None:
        self._arguments, self._parts = arguments, parts or {}

    def of(self, text: str) -> str:
        """Return a message in these words. Arguments in calls that it shows, as `Class(name=...)`, stay."""
        said = _ARGUMENT.sub(self._argument, text)
        return _FIELD.sub(lambda found: self._parts[found[1]] + found[2] if found[1] in self._parts else found[0], said)

    def _argument(self, found: re.Match[str]) -> str:
        name, value = self._arguments.get(found[1] or found[3]), found[2] or ""
        if name is None or re.search(r"\w\([^()]*$", found.string[: found.start()]):
            return found[0]
        if not name.endswith(" "):
            return name.rstrip("=") if found[3] else name + value
        option = name.strip()
        if found[3]:
            return option
        if value in ("True", "False"):
            return option if value == "True" else f"--no-{option[2:]}"
        if value == "None":
            return f"no {option}"
        if value.startswith("["):
            return " ".join(name + each for each in re.findall(r"[^\[\]'\", ]+", value))
        follows = value or found.string[found.end() : found.end() + 1].strip(" .,;:)")
        return name + value.strip("'\"") if follows else option

    @contextlib.contextmanager
    def spoken(self) -> Iterator[None]:
        """Give errors of memfit that leave this context these words."""
        try:
            yield
        except MemfitError as e:
            e.args = tuple(self.of(part) if isinstance(part, str) else part for part in e.args)
            raise


def options(names: Mapping[str, str]) -> Words:
    """Return the words of a command: of the library's arguments, the names of its options.

    Args:
        names: The command's parameters with their options (`{"budget": "--budget"}`). Where the library takes several
            of something, the option is given several times: `precisions=` is `--precision`; and `limit_bytes=` is
            `--limit`.
    """
    arguments = {name: f"{option} " for name, option in names.items()}
    several = {f"{name}s": option for name, option in arguments.items()}
    in_bytes = {f"{name}_bytes": option for name, option in arguments.items()}
    return Words(several | in_bytes | arguments)


LOOP = Words(
    {}, {"model": "the model", "batch": "the loop's batch", "loss_fn": "the loop", "optimizer": "the optimizer"}
)
"""Of a loop that memfit watches: its user has no `Workload`."""


# The user's functions by name: of workloads, and of logs

NAME = "write file.py:function or package.module:function; the function"
HOW = f"{NAME} has no arguments and returns a memfit.Workload"


def parts_of(name: str, noun: str = "workload", how: str = HOW) -> tuple[str, str]:
    """Return the file or module that a name has, and the function; nothing is imported.

    Errors say what the function is for (`noun`), and how it is named.
    """
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise WorkloadError(f"the {noun} {name!r} can't be found: {how}")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise WorkloadError(f"the {noun}'s file {place!r} does not exist: {how}")
    elif not has_module(place.partition(".")[0]):
        raise WorkloadError(no_module(place, how))
    return place, function


def has_module(name: str) -> bool:
    """Tell whether there is a module of this name, without a dot, in the current folder or installed."""
    look_in(Path.cwd())
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that has no spec, such as __main__
        return name in sys.modules


def no_module(name: str, how: str = HOW) -> str:
    """Return the message for a module that is not there."""
    return f"there is no module {name!r} in {Path.cwd()}, and none is installed: {how}"


def look_in(folder: Path) -> None:
    """Have imports look in a folder first, for good: what is loaded from it may import its neighbours later."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

"""Records: their versioned JSON, strict when read and atomic when written, and their display.

Reading executes no code. Records don't import tables: `memfit.report` registers the view of each type with `show_with`.
"""

from __future__ import annotations

import os
import reprlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from memfit.errors import OutputError, PlanError, UsageError

T = TypeVar("T")
_TRIED_BYTES = 2**16  # written to test for disk space: most plans take less


def encode(record: Any) -> bytes:
    """Return a record as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes, kind: type[T], *, source: str, error: type[UsageError] = PlanError) -> T:
    """Decode a record from JSON.

    Args:
        kind: The record's type, with a field `schema`, whose default is the only version read.
        error: The error to raise.

    Raises:
        UsageError: As the type `error`, when the JSON is not such a record.
    """
    noun = kind.__name__.lower()
    try:
        schema = msgspec.json.decode(data, type=dict[str, Any]).get("schema")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise error(f"{source} is not a {noun}: it must be a JSON object ({e})") from e
    expected = next(f.default for f in msgspec.structs.fields(kind) if f.name == "schema")  # type: ignore[arg-type]
    if schema != expected:
        raise error(f"{source} is not a {noun} that this memfit reads: its schema is {schema!r}, not {expected!r}")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        advice = next((f". What to do: {text}" for why, text in _advice.items() if why in str(e)), "")
        raise error(f"{source} is not a valid {noun}: {e}{advice}") from e


_advice: dict[str, str] = {}


def advise(why: str, text: str) -> None:
    """Have errors of records that are not valid give advice, where msgspec's message has a certain reason."""
    _advice[why] = text


def read(path: str | Path, kind: type[T], *, error: type[UsageError] = PlanError) -> T:
    """Read a record from a file.

    Raises:
        UsageError: As the type `error`, when the file can't be read or is not such a record.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise error(f"can't read {path}: {e.strerror or e}") from e
    return decode(data, kind, source=str(path), error=error)


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, by writing an unnamed temporary one.

    Missing folders are accepted: `write_atomic` creates them.

    Raises:
        OutputError: The file can't be written.
    """
    path = Path(path).absolute()
    try:
        if path.is_dir():
            raise OutputError(f"can't write {path}: it is a folder")
        folder = next(parent for parent in path.parents if parent.exists())
        if not folder.is_dir():
            raise OutputError(f"can't write {path}: {folder} is a file")
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(bytes(_TRIED_BYTES))
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise OutputError(f"can't write {path}: {e.strerror or e}") from e


def write_atomic(path: str | Path, data: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises:
        OutputError: The file can't be written; an older one is unchanged.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as f:
            temporary = Path(f.name)
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
    except OSError as e:
        raise OutputError(f"can't write {path}: {e.strerror or e}") from e
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


_MOST_FIELDS = 12
_short = reprlib.Repr()  # shortens long values at any depth
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 3, 3, 3, 4
_short.maxstring, _short.maxother = 60, 200
_Item = TypeVar("_Item")


class View(NamedTuple):
    """The view of one type of record.

    Args:
        line: Returns the text of `repr` within angle brackets; None for the fields that are not at their defaults.
        text: Returns the tables for `print`; None for the text of `repr`.
        html: Returns the HTML for a notebook; None for the text.
    """

    line: Callable[[Any], str] | None = None
    text: Callable[[Any], str] | None = None
    html: Callable[[Any], str] | None = None


_views: dict[type, View] = {}


def show_with(kind: type, view: View) -> None:
    """Register the view of a type of record."""
    _views[kind] = view


class Shown(msgspec.Struct, frozen=True):
    """A record with a `repr` of one line, and the text and HTML registered with `show_with`."""

    def __repr__(self) -> str:
        """Return its line, or its type and the fields that are not at their defaults, with long values shortened."""
        line = _view(self).line
        if line is not None:
            return f"<{type(self).__name__} {line(self)}>"
        parts = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            if default is msgspec.NODEFAULT or value != default:
                parts.append(f"{field.name}={_short.repr(value)}")
        more = [f"and {len(parts) - _MOST_FIELDS} more"] if len(parts) > _MOST_FIELDS else []
        return f"{type(self).__name__}({', '.join([*parts[:_MOST_FIELDS], *more])})"

    def __str__(self) -> str:
        text = _view(self).text
        return repr(self) if text is None else text(self)

    def _repr_html_(self) -> str | None:
        html = _view(self).html
        return None if html is None else html(self)


class ShownList(list[_Item]):
    """A list that is printed, and shown in a notebook, as one table."""

    def __str__(self) -> str:
        text = _view(self).text
        return repr(self) if text is None or not self else text(self)

    def _repr_html_(self) -> str | None:
        html = _view(self).html
        return None if html is None or not self else html(self)


def _view(record: Any) -> View:
    return _views.get(type(record), View())

"""Versioned JSON for the records: strict when read, atomic when written. Reading executes no code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

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
        raise error(f"{source} is not a valid {noun}: {e}") from e


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

"""Folders of checkpoints: their contents, the newest one, and how they are set aside and removed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import msgspec

from memfit import ir
from memfit.errors import CheckpointError, OutputError, UsageError
from memfit.training.runs.tensor_files import is_shard_name

MANIFEST = "checkpoint.json"
PLAN = "plan.json"
FILES = (
    PLAN,
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "training.json",
    "training.safetensors",
)
_FOLDER = re.compile(r"checkpoint-([0-9]+)")
_ASIDE = re.compile(r"damaged-checkpoint-[0-9]+(\.[0-9]+)?")
_TEMPORARY = re.compile(r"\.checkpoint-[0-9]+\.[0-9]+\.(new|old)\.tmp")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint."""

    sha256: str
    size_bytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `checkpoint.json`.

    Attributes:
        sha256: SHA-256 of this record with this field empty.
    """

    schema: str = "memfit.checkpoint/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    step: int
    files: dict[str, FileEntry]
    sha256: str = ""

    def sealed(self) -> Checkpoint:
        """Return this record with its own SHA-256."""
        bare = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(bare, sha256=hashlib.sha256(ir.codec.encode(bare)).hexdigest())


def newest_first(folder: Path) -> list[Path]:
    """Return the folders named as checkpoints, by step."""
    try:
        steps = {path: n for path in folder.iterdir() if (n := step_of(path)) is not None}
    except OSError:
        return []
    return sorted(steps, key=lambda path: -steps[path])


def set_aside_after(folder: Path, step_count: int) -> list[Path]:
    """Set aside the damaged checkpoints after a step.

    Raises:
        OutputError: A checkpoint can't be renamed.
    """
    return [set_aside(path) for path in newest_first(folder) if (step_of(path) or 0) > step_count]


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-checkpoint-<step>`, with a number appended where that exists.

    Raises:
        OutputError: The checkpoint can't be renamed.
    """
    numbers = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
    place = next(p for n in numbers if not (p := path.with_name(f"damaged-{path.name}{n}")).exists())
    try:
        return path.rename(place)
    except OSError as e:
        raise OutputError(f"can't rename {path} to {place}: {e.strerror or e}") from e


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder: it has all its files in full size."""
    return next((path for path in newest_first(folder) if _is_complete(path)), None)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def is_ours(path: Path) -> bool:
    """Tell whether a folder is a checkpoint of memfit, complete or not, and holds nothing else."""
    return has_schema(path / MANIFEST, "memfit.checkpoint/") and holds_only_ours(path)


def has_schema(path: Path, prefix: str = "memfit.") -> bool:
    """Tell whether a file is JSON of memfit, by the beginning of its schema."""
    try:
        return str(json.loads(path.read_bytes())["schema"]).startswith(prefix)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def holds_only_ours(path: Path) -> bool:
    """Tell whether all files of a folder have names that `save` gives, as in a checkpoint without its manifest."""
    try:
        return all(name in (MANIFEST, *FILES) or is_shard_name(name) for name in os.listdir(path))
    except OSError:
        return False


def all_set_aside(folder: Path) -> list[Path]:
    """Return the damaged checkpoints that were set aside in a folder."""
    return [path for path in folder.iterdir() if _ASIDE.fullmatch(path.name) and holds_only_ours(path)]


def remove(path: Path) -> None:
    """Remove a checkpoint atomically: it is renamed first.

    Raises:
        OSError: The checkpoint can't be removed.
    """
    old = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that a crash during `save` or `remove` left behind."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, step_count: int, keep: int) -> None:
    """Remove the oldest checkpoints up to a step, except `keep`; those with files that memfit did not write stay."""
    earlier = [path for path in newest_first(folder) if (step_of(path) or 0) <= step_count]
    complete = [path for path in earlier if is_ours(path) and _is_complete(path)]
    for path in complete[keep:]:
        remove(path)


def _is_complete(path: Path) -> bool:
    try:
        manifest = ir.codec.read(path / MANIFEST, Checkpoint, error=CheckpointError)
        return all((path / name).stat().st_size == entry.size_bytes for name, entry in manifest.files.items())
    except (OSError, UsageError):
        return False

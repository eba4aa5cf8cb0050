"""The folder of a run: checks that a run may write to it, and removes only memfit's own files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from memfit.errors import CheckpointError, OutputError, UsageError
from memfit.ranks.one_process import SingleProcess
from memfit.ranks.together import once
from memfit.training.guards.snapshots import all_snapshots
from memfit.training.runs import checkpoint_folders
from memfit.training.runs.lock import LOCK, locked
from memfit.training.runs.log import read_lines

RUN, PLAN, METRICS, TENSORBOARD = "run.json", "plan.json", "metrics.jsonl", "tensorboard"
VIEWS, REPORT = "views.json", "report.html"
_FILES = (METRICS, RUN, PLAN, VIEWS, REPORT)
_TEMPORARY = re.compile(r"\..*\.tmp")


@contextlib.contextmanager
def held_folder(out: Path, *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Lock and check a folder for a run while the context is entered.

    Raises:
        OutputError: Another run holds the folder; and all that `check_folder` raises.
    """
    _check_arguments(overwrite, resume)
    _check_writable(out)
    with locked(out):
        check_folder(out, overwrite=overwrite, resume=resume)
        yield


@contextlib.contextmanager
def held_by_ranks(ranks: SingleProcess, out: Path, *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Lock and check a folder for a run, as `held_folder` does: the first rank, for all of them."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            stack.enter_context(held_folder(out, overwrite=overwrite, resume=resume))

        once(ranks, hold)
        yield


def is_begun(out: Path) -> bool:
    """Tell whether a folder holds a checkpoint, whole or not, of a run that can go on."""
    return out.is_dir() and bool(_checkpoints(out) or checkpoint_folders.all_set_aside(out))


def holds_a_start(out: Path) -> bool:
    """Tell whether a folder holds the files of a run, all of them memfit's."""
    names = [path.name for path in out.iterdir() if path.name != LOCK] if out.is_dir() else []
    return bool(names) and all(name in (*_FILES, TENSORBOARD) or _TEMPORARY.fullmatch(name) for name in names)


def check_folder(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Check that a run may be written to a folder; nothing is changed.

    Raises:
        UsageError: Both `overwrite` and `resume` are given.
        OutputError: The folder can't be written, or holds files that must not be overwritten.
        CheckpointError: There is nothing to resume from.
    """
    _check_arguments(overwrite, resume)
    _check_writable(out)
    try:
        names = sorted(path.name for path in out.iterdir() if path.name != LOCK) if out.exists() else []
    except OSError as e:
        raise OutputError(f"can't read out={str(out)!r}: {e.strerror or e}") from e
    if resume:
        newest = checkpoint_folders.latest(out)
        if newest is None:
            raise CheckpointError(f"out={str(out)!r} has no complete checkpoint: start again with overwrite=True")
        _check_only_own_in_the_way(out, after_step=checkpoint_folders.step_of(newest))
    elif names and not overwrite:
        raise OutputError(
            f"out={str(out)!r} is not empty; it has {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: give"
            " another out=, overwrite=True to replace the run in it, or resume=True to continue it"
        )
    elif names:
        _check_only_own_in_the_way(out)


def clear_folder(out: Path) -> None:
    """Remove the run in a folder. Files that memfit did not write stay.

    Raises:
        OutputError: A file can't be removed.
    """
    try:
        for path in [*_checkpoints(out), *checkpoint_folders.all_set_aside(out)]:
            if checkpoint_folders.is_ours(path):
                checkpoint_folders.remove(path)
            elif checkpoint_folders.step_of(path) is not None:
                checkpoint_folders.set_aside(path)
        remove_leftovers(out)
        for path in [*all_snapshots(out), *(out / name for name in _FILES)]:
            path.unlink(missing_ok=True)
        events = out / TENSORBOARD
        for path in events.glob("events.out.tfevents.*"):
            path.unlink()
        if events.is_dir() and not any(events.iterdir()):
            events.rmdir()
    except OSError as e:
        raise OutputError(f"can't replace the run in out={str(out)!r}: {e.strerror or e}") from e


def remove_leftovers(out: Path) -> None:
    """Remove temporary files that a crash left behind."""
    checkpoint_folders.remove_leftovers(out)
    for path in (path for name in (*_FILES, "out-of-memory-*.pickle") for path in out.glob(f".{name}.*.tmp")):
        path.unlink(missing_ok=True)


def _check_arguments(overwrite: bool, resume: bool) -> None:
    if overwrite and resume:
        raise UsageError("overwrite=True and resume=True contradict each other: give one of them")


def _check_writable(out: Path) -> None:
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"can't write to out={str(out)!r}: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"can't write to out={str(out)!r}: no permission to write to {existing}")


def _check_only_own_in_the_way(out: Path, *, after_step: int | None = None) -> None:
    """Raise OutputError if the run would overwrite files that memfit did not write; checkpoints come after a step."""
    first = -1 if after_step is None else after_step
    foreign = [
        p
        for p in _checkpoints(out)
        if (checkpoint_folders.step_of(p) or 0) > first and not checkpoint_folders.holds_only_ours(p)
    ]
    foreign += [
        out / name for name in (RUN, PLAN) if (out / name).exists() and not checkpoint_folders.has_schema(out / name)
    ]
    if foreign:
        raise OutputError(f"{foreign[0]} exists, and memfit did not write it: move it, or give another out=")
    read_lines(out / METRICS)


def _checkpoints(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if checkpoint_folders.step_of(path) is not None]

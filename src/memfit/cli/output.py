"""How the command line speaks: tables and JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from memfit.errors import MemfitError
from memfit.frames import frames_text

out = Console()
err = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print a record, or plain values, as one JSON document."""
    plain = msgspec.to_builtins(value)
    print(json.dumps(plain, indent=2, allow_nan=False, default=str))


def print_error(error: Exception, as_json: bool, is_whole: bool) -> None:
    """Print an error with the user's frames, or with its whole traceback; as JSON too where that was asked for."""
    said = str(error) if isinstance(error, MemfitError) else f"{type(error).__name__}: {error}"
    if is_whole:
        traceback.print_exception(error)
    err.print(f"[bold red]error:[/] {_escaped(said)}", highlight=False, soft_wrap=True)
    frames = frames_text(error)
    if frames and not is_whole:
        err.print(_escaped(frames), highlight=False, soft_wrap=True, style="dim")
    if as_json:
        numbers = {k: v for k, v in vars(error).items() if not k.startswith("_")}
        print_json({"error": {"type": type(error).__name__, "message": said, **numbers, "frames": frames}})


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


class Report(Protocol):
    """Says how far a stage is."""

    def __call__(self, stage: str, done: int, total: int | None, note: str = "") -> None: ...


@contextlib.contextmanager
def stages() -> Iterator[Report]:
    """Show a bar for each stage that reports how far it is."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=err) as progress:

        def report(stage: str, done: int, total: int | None, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, note=note)
            progress.update(tasks[stage], completed=done, total=total, note=note)

        yield report

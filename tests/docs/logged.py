"""What the trackers of `docs/guides/trackers.md` hold after one of its examples: run in the folder that it ran in."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

STEPS = {1, 2, 3}


def of_tensorboard(folder: str, tag: str) -> set[int]:
    """Return the steps of a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder)  # type: ignore[no-untyped-call]
    events.Reload()  # type: ignore[no-untyped-call]
    return {scalar.step for scalar in events.Scalars(tag)}  # type: ignore[no-untyped-call]


def of_wandb() -> set[int]:
    """Return the steps whose losses are in the files of offline runs, which are in wandb's own format."""
    written = b"".join(path.read_bytes() for path in Path("wandb").glob("offline-run-*/run-*.wandb"))
    lines = map(json.loads, Path("runs/wandb/metrics.jsonl").read_text().splitlines())
    return {line["step"] for line in lines if "loss" in line and json.dumps(line["loss"]).encode() in written}


def of_database(path: Path, query: str) -> set[int]:
    """Return the steps that a query gives."""
    return {step for (step,) in sqlite3.connect(path).execute(query)}


def main() -> None:
    """Check the tracker of which there are files here."""
    trackio = Path(os.environ["TRACKIO_DIR"], "memfit.db")
    looks: dict[Path, Callable[[], set[int]]] = {
        Path("runs/tensorboard"): lambda: of_tensorboard("runs/tensorboard/tensorboard", "train/loss"),
        Path("runs/loop"): lambda: of_tensorboard("runs/loop", "seconds"),
        Path("wandb"): of_wandb,
        Path("mlflow.db"): lambda: of_database(Path("mlflow.db"), "select step from metrics where key = 'loss'"),
        trackio: lambda: of_database(trackio, "select step from metrics where cast(metrics as text) like '%\"loss\"%'"),
    }
    (found,) = [look() for path, look in looks.items() if path.exists()]
    assert found == STEPS, found


if __name__ == "__main__":
    main()

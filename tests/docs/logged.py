"""What the trackers of `docs/guides/trackers.md` hold after its examples: run in the folder that these ran in."""

from __future__ import annotations

import json
import os
import sqlite3
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
    return {line["step"] for line in lines if json.dumps(line["loss"]).encode() in written}


def of_database(path: Path, query: str) -> set[int]:
    """Return the steps that a query gives."""
    return {step for (step,) in sqlite3.connect(path).execute(query)}


def main() -> None:
    """Check each tracker."""
    trackio = Path(os.environ["TRACKIO_DIR"], "memfit.db")
    found = {
        "TensorBoard": of_tensorboard("runs/tensorboard/tensorboard", "train/loss"),
        "a loop, in TensorBoard": of_tensorboard("runs/loop", "seconds"),
        "Weights & Biases": of_wandb(),
        "MLflow": of_database(Path("mlflow.db"), "select step from metrics where key = 'loss'"),
        "trackio": of_database(trackio, "select step from metrics where cast(metrics as text) like '%\"loss\"%'"),
    }
    assert all(steps == STEPS for steps in found.values()), found
    print("4 trackers have 3 steps each")


if __name__ == "__main__":
    main()

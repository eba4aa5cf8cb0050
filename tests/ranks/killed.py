"""A workload whose ranks are killed where a file says, one after the other, each once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.training import Step, Trainer
from memfit.training.runs import checkpoint
from memfit.workload import Workload
from tests.ranks import trainings
from tests.training.held_writes import HeldWrites

DEATHS = "MEMFIT_TEST_DEATHS"
"""The variable that names a file: the deaths to come, as [rank, place, number of the call or seconds]."""
PLACES: dict[str, tuple[Any, str]] = {
    "in a step": (Step, "compute_loss"),
    "before the update": (Step, "_update"),
    "before its shards": (checkpoint, "write_tensors"),
    "before the sums": (checkpoint.Writing, "_publish"),
    "before the rename": (Path, "rename"),
    "before old ones go": (checkpoint, "prune"),
    "in an evaluation": (Trainer, "_evaluate"),
    "while a thread writes": (Step, "_update"),  # which it never ends to
}


def workload() -> Workload:
    """Return the workload, in a process that dies as the file says."""
    deaths = Path(os.environ[DEATHS])
    coming = json.loads(deaths.read_text())
    if coming and coming[0][0] == int(os.environ.get("RANK", "0")):
        _, place, number = coming[0]

        def die() -> None:
            left = deaths.with_suffix(".new")
            left.write_text(json.dumps(coming[1:]))
            left.rename(deaths)
            os.kill(os.getpid(), signal.SIGKILL)

        _arm(place, number, die)
    given = trainings.workload()
    torch.manual_seed(5)
    random.seed(5)
    return given


def _arm(place: str, number: float, die: Callable[[], None]) -> None:
    if place == "at a time":
        timer = threading.Timer(number, die)
        timer.daemon = True
        timer.start()
        return
    if place == "while a thread writes":
        HeldWrites(pytest.MonkeyPatch())
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), iter(range(1, 10**6))

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)

"""A run that is killed after its sixth step, while a thread writes: give this module the run's folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.training.runs.log import RunOptions
from memfit.training.step import Step
from memfit.training.trainer import Trainer
from tests.training.conftest import make_plan, make_workload
from tests.training.held_writes import HeldWrites


def _die(progress: Any) -> None:
    if progress.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    HeldWrites(pytest.MonkeyPatch())
    given = make_workload("shuffled")
    options: dict[str, Any] = {"checkpoint_every": 4, "async_checkpoints": True, "on_step": _die}
    Trainer(Step(given), make_plan(given), RunOptions(out=Path(sys.argv[1]), steps=8, **options)).fit()

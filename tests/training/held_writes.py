"""Checkpoints whose thread is held until a test lets it go on: steps run meanwhile, however fast the disk is.

As a program it is a run in a folder, killed after its sixth step while a thread writes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from memfit.training import MANIFEST, RunOptions, Step, Trainer
from tests.training.conftest import make_plan, make_workload, read_tensors

THREAD = "memfit-checkpoint"


class HeldWrites:
    """Writes of tensors that wait in a thread for `let_go`, and those of the main thread as they are.

    Args:
        error: Raised in the thread afterwards, in place of writing.
    """

    def __init__(self, patch: pytest.MonkeyPatch, error: OSError | None = None) -> None:
        self._gate, self._error, self._write = threading.Event(), error, safetensors.torch.save_file
        patch.setattr(safetensors.torch, "save_file", self._held)

    def _held(self, *args: Any) -> None:
        if threading.current_thread().name == THREAD:
            assert self._gate.wait(120)
            if self._error is not None:
                raise self._error
        self._write(*args)

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def end(self) -> None:
        """Let the thread go on, and wait until it has ended."""
        self.let_go()
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join()


def stored(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, by file; not the sums of headers, in which metadata is in any order."""
    texts = {file.name: file.read_text() for file in path.glob("*.json") if file.name != MANIFEST}
    return {**texts, **{file.name: read_tensors(file) for file in path.glob("*.safetensors")}}


def names(out: Path) -> list[str]:
    """Return the names of the checkpoints in a run's folder, those without a place too, without process numbers."""
    there = [path.name for path in out.iterdir() if "checkpoint-" in path.name]
    return sorted(name.split(".")[1] + " in the making" if name.endswith(".new.tmp") else name for name in there)


def _die(progress: Any) -> None:
    if progress.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    HeldWrites(pytest.MonkeyPatch())
    given = make_workload("shuffled")
    options: dict[str, Any] = {"checkpoint_every": 4, "async_checkpoints": True, "on_step": _die}
    Trainer(Step(given), make_plan(given), RunOptions(out=Path(sys.argv[1]), steps=8, **options)).fit()

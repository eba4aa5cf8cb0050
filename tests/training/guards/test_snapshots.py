"""A snapshot of a step that ran out of memory is written whole or not at all, and never in the way of the error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.ir import Plan
from memfit.training import Snapshots

MOST_SNAPSHOTS = 8
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def written(plan: Plan, batch: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps({"batch": batch}))


def of(folder: Path, device: torch.device = CPU, predicted: Any = written) -> Snapshots:
    return Snapshots(folder, device, predicted)


def test_on_the_cpu_it_is_the_predicted_step(tmp_path: Path) -> None:
    said = of(tmp_path).write(7, None, "the batch")  # type: ignore[arg-type]
    assert said == "predicted memory snapshot: out-of-memory-7.pickle"
    assert pickle.loads((tmp_path / "out-of-memory-7.pickle").read_bytes()) == {"batch": "the batch"}


def test_on_a_gpu_it_is_the_allocator_s_when_the_error_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the allocator, which holds something else by the time that the file is written."""
    held = ["activations"]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"device": device.index, "held": list(held)})
    snapshots = of(tmp_path / "new", CUDA)
    snapshots.take()
    held.clear()
    assert snapshots.write(3, None, None) == "memory snapshot: out-of-memory-3.pickle"  # type: ignore[arg-type]
    found = pickle.loads((tmp_path / "new/out-of-memory-3.pickle").read_bytes())
    assert found == {"device": 1, "held": ["activations"]}


def test_names_are_not_used_twice_and_a_folder_is_not_filled(tmp_path: Path) -> None:
    said = [of(tmp_path).write(7, None, None) for _ in range(MOST_SNAPSHOTS + 2)]  # type: ignore[arg-type]
    assert said[1].endswith("out-of-memory-7.2.pickle") and len(list(tmp_path.iterdir())) == MOST_SNAPSHOTS
    assert all(f"already has {MOST_SNAPSHOTS} snapshots" in text for text in said[MOST_SNAPSHOTS:])


def test_what_goes_wrong_is_said_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError("no room for it")

    assert "MemoryError('no room" in of(tmp_path, CPU, failing).write(1, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", failing)
    snapshots = of(tmp_path, CUDA)
    snapshots.take()
    assert "MemoryError('no room" in snapshots.write(1, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {})
    monkeypatch.setattr("os.replace", failing)
    snapshots.take()
    assert "MemoryError('no room" in snapshots.write(1, None, None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {})
    snapshots = of(tmp_path / "file" / "run", CUDA)
    snapshots.take()
    assert snapshots.write(1, None, None).startswith("no memory snapshot (")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

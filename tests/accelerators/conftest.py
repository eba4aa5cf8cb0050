"""An accelerator to run on: the GPU that is here, or the one in Python, in a process that is its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit import hardware
from tests.accelerator_device import load
from tests.accelerator_device.conftest import IS_WANTED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of this folder `gpu`, which skips them without one, unless the accelerator in Python is wanted."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if IS_WANTED and here:
        load()
    elif not IS_WANTED:
        for item in here:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def kind() -> str:
    """The kind of the accelerator."""
    found = hardware.accelerators.current_kind()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def place(kind: str) -> torch.device:
    """The accelerator."""
    return torch.device(kind, 0)


@pytest.fixture
def command(kind: str) -> list[str]:
    """The command that runs memfit in a process with the accelerator."""
    with_it = ["tests.accelerator_device", "memfit"] if kind == "acc" else ["memfit"]
    return [sys.executable, "-m", *with_it]


@pytest.fixture(autouse=True)
def _deterministic(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have kernels make the same bits each time, without their caches' help from one test to the next."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folder for folder in sys.path if folder))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(kind == "cuda")
    yield
    torch.use_deterministic_algorithms(before)
    hardware.accelerators.release_cache()

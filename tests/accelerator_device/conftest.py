"""The device "acc", in a process that is its own: once loaded, it is every later test's accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

IS_WANTED = os.environ.get("MEMFIT_TEST_ACCELERATOR") == "1"


class Skipped(pytest.Module):
    """A test file that changes what this process takes for its accelerator."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs a process of its own: MEMFIT_TEST_ACCELERATOR=1", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if IS_WANTED else Skipped.from_parent(parent, path=module_path)

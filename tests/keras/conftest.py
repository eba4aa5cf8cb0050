"""TensorFlow, where there is one; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"  # or TensorFlow counts no memory of processors without AVX512-VNNI
os.environ["TF_NUM_INTEROP_THREADS"] = "1"  # or operators run in another order each time, and peaks differ
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


class Skipped(pytest.Module):
    """A test file that can't be imported here."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs TensorFlow, which has an environment of its own: make test-keras", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_TENSORFLOW else Skipped.from_parent(parent, path=module_path)

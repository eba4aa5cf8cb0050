"""Jittor, prepared before a test imports it; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest

HAS_JITTOR = importlib.util.find_spec("jittor") is not None

if HAS_JITTOR:
    import memfit.jittor  # noqa: F401


class Skipped(pytest.Module):
    """A test file that can't be imported here."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs Jittor, which has an environment of its own: make test-jittor", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_JITTOR else Skipped.from_parent(parent, path=module_path)

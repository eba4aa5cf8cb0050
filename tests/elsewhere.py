"""Folders of tests that are skipped where what they need is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest


def skipped_without(is_here: bool, why: str) -> Callable[[Path, pytest.Package], pytest.Module | None]:
    """Return the hook that skips a folder's test files, which can't be imported here."""

    class Skipped(pytest.Module):
        def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
            pytest.skip(why, allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Package) -> pytest.Module | None:
        return None if is_here else Skipped.from_parent(parent, path=module_path)

    return pytest_pycollect_makemodule

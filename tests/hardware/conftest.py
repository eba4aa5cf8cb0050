"""Tests see no devices of the user who runs them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's file of devices, which is not there yet."""
    path = tmp_path / "configuration" / "devices.toml"
    monkeypatch.setenv("MEMFIT_DEVICES", str(path))
    return path

"""Tests see no devices of the user who runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

_READ = Path.read_text


def cgroups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a folder stand for /sys/fs/cgroup; its file `own` says what group this process is in."""

    def read(path: Path, *given: str, **named: str) -> str:
        text = str(path).replace("/proc/self/cgroup", f"{folder}/own").replace("/sys/fs/cgroup", str(folder))
        return _READ(Path(text), *given, **named)

    monkeypatch.setattr(Path, "read_text", read)
    return folder


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's file of devices, which is not there yet."""
    path = tmp_path / "configuration" / "devices.toml"
    monkeypatch.setenv("MEMFIT_DEVICES", str(path))
    return path

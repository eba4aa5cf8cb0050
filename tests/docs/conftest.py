"""The site, built once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import shared_folder
from tests.docs.pages import ROOT


@dataclass(frozen=True)
class Site:
    """What was built, and what was said meanwhile."""

    folder: Path
    log: str
    status: int


@pytest.fixture(scope="session")
def site() -> Site:
    """The site as `make docs` builds it, with a network that nothing answers in; processes of a session share it."""
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")
    folder = shared_folder() / "site"
    said = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not said.exists():
            said.write_text(json.dumps(_built(folder)))
    return Site(folder, *json.loads(said.read_text()))


def _built(folder: Path) -> tuple[str, int]:
    """Build the site in a folder; return what was said, and the status."""
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **nowhere, "NO_PROXY": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode

"""The site, built once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@dataclass(frozen=True)
class Site:
    """What was built, and what was said meanwhile."""

    folder: Path
    log: str
    status: int


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site as `make docs` builds it, with a network that nothing answers in."""
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, **nowhere, "NO_PROXY": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return Site(folder, done.stdout + done.stderr, done.returncode)

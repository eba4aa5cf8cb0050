"""Runs a module of the tests in a process with fake CUDA, and takes its answers."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memfit
from memfit import hardware

_ROOTS = (Path(memfit.__file__).parent.parent, Path(__file__).parents[2])


def answers(module: str, *besides: str) -> dict[str, Any]:
    """Return what scenarios of a module found, all but some, by name; what one raised has "error" and "message"."""
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder, "reply")
        paths = os.pathsep.join(map(str, _ROOTS))
        done = subprocess.run(
            hardware.shim.command(module, str(reply), *besides),
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert reply.exists(), done.stderr[-4000:]
        found: dict[str, Any] = json.loads(reply.read_text())
        return found


def answer(scenarios: dict[str, Callable[[], Any]]) -> None:
    """Run scenarios and write what they return, as the process that `answers` started."""
    gc.collect()
    gc.freeze()  # as tests/conftest.py
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario()
        except Exception as e:
            found[name] = {"error": type(e).__name__, "message": str(e), "where": traceback.format_exc()}
    Path(sys.argv[1]).write_text(json.dumps(found))

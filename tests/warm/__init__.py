"""Processes that start at once: forks of one that has PyTorch and memfit imported, and has run nothing yet.

A test that needs a process of its own mostly needs its end, its streams, its memory or its folder to itself, and not
the seconds that it takes to import PyTorch. `run` and `command` start it as a fork of a server, of which a session has
two: one as any process, and one with fake CUDA (`memfit.hardware.shim`). What tests the start itself, or that
something is not imported, takes `subprocess` and `sys.executable`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memfit import hardware

ROOT = Path(__file__).parents[2]
_SHARED = "MEMFIT_TESTS_WARM"
"""Names the folder of the servers that the processes of a session share."""
_CLIENT = Path(__file__).with_name("client.py")
_cold_fake_cuda = hardware.shim.command


class Servers:
    """The servers of a session, which start when they are first asked for and end with it.

    Attributes:
        folder: Where their sockets are, once they are started.
        traces: Where a session's captures are kept (`tests.remembered`); None to capture all.
    """

    traces: Path | None = None

    def __init__(self) -> None:
        self.folder = Path()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start both, which then get ready side by side with the tests; those that connect wait for them."""
        if self._started:
            return
        if _SHARED in os.environ:
            self.folder = Path(os.environ[_SHARED])
            return
        self.folder = Path(tempfile.mkdtemp(prefix="memfit-warm-"))
        paths = os.pathsep.join([str(Path(hardware.shim.__file__).parents[2]), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        traces = str(self.traces or "")
        lines = [
            [sys.executable, "-m", "tests.warm.server", str(self.folder), "cpu", traces],
            _cold_fake_cuda("tests.warm.server", str(self.folder), "cuda", traces),
        ]
        for line in lines if hardware.shim.why_not() is None else lines[:1]:
            self._started.append(subprocess.Popen(line, cwd=ROOT, env=environment, stdin=subprocess.PIPE))

    def share(self) -> None:
        """Start both for the processes that this one starts too."""
        self.start()
        os.environ[_SHARED] = str(self.folder)

    def end(self) -> None:
        """End what was started, and wait for it."""
        for process in self._started:
            assert process.stdin is not None
            process.stdin.close()  # which they watch
        for process in self._started:
            process.wait()
        if self._started:
            os.environ.pop(_SHARED, None)
            shutil.rmtree(self.folder)
        self._started.clear()


servers = Servers()


def command(*line: str, kind: str = "cpu", folder: Path | str | None = None) -> list[str]:
    """Return the command that runs `python LINE...` in a fork of a server.

    Args:
        line: The interpreter's arguments: "-c" or "-m" and what follows, or a script and its arguments.
        kind: Of the server: "cpu" or "cuda".
        folder: Where the servers' sockets are; None for this session's, which are started.
    """
    if folder is None:
        servers.start()
    return [sys.executable, "-I", "-S", str(_CLIENT), str(Path(folder or servers.folder, kind)), *line]


def fake_cuda_command(module: str, *arguments: str, folder: Path | str | None = None) -> list[str]:
    """Return the command that runs a module with fake CUDA, in a fork where it is memfit's own or the tests'."""
    if module.split(".")[0] in ("memfit", "tests"):
        return command("-m", module, *arguments, kind="cuda", folder=folder)
    return _cold_fake_cuda(module, *arguments)


def run(
    line: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python LINE...` in a fork, and return its status and what it wrote.

    Args:
        line: The interpreter's arguments.
        cwd: The folder that it runs in; None for this one.
        env: Its environment; None for this one.
    """
    return subprocess.run(command(*line), cwd=cwd, env=env, capture_output=True, text=True, check=False)

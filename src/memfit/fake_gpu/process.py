"""A process of its own for one call, with fake CUDA tensors or without."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.errors import CaptureError
from memfit.fake_gpu import shim
from memfit.interrupts import Unwinding, safe_point
from memfit.progress import Progress

_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1  # from one look for signals to the next


def run(call: bytes, progress: Progress, *, fakes_cuda: bool = True, over: threading.Event | None = None) -> Any:
    """Return the result of a pickled call that runs in a process of its own, and report its stages.

    The process is no rank of any group, even where this one is.

    Args:
        call: The pickled function of `progress`.
        fakes_cuda: Whether CUDA tensors are fake there.
        over: Set where nobody waits for the result any more.

    Raises:
        MemfitError: The function raised it there.
        CaptureError: The function raised another error, or the process ended without a reply.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        request.write_bytes(pickle.dumps((sys.path, sys.argv, call)))
        # Stages travel by a pipe of their own: the user's code may print.
        reading, writing = os.pipe()
        given = ("memfit.fake_gpu.worker", str(request), str(reply), str(writing))
        line = shim.command(*given) if fakes_cuda else command(*given)
        # Variables by which a launcher such as torchrun numbers its ranks are left out.
        numbered = {name for name in os.environ if name in _LAUNCHERS or name.startswith("TORCHELASTIC_")}
        environment = {name: value for name, value in os.environ.items() if name not in numbered}
        if not fakes_cuda:  # it finds memfit by its name
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        with subprocess.Popen(line, pass_fds=(writing,), stdout=2, env=environment) as process:
            os.close(writing)
            try:
                for stage in _lines(reading, over or threading.Event()):
                    progress(*json.loads(stage))
            except BaseException:
                process.kill()
                raise
        if not reply.exists():
            raise CaptureError(
                f"the process that predicts ended without a reply, with status {process.returncode}: see its output"
                " above (-9 often means that this machine ran out of memory)"
            )
        result = pickle.loads(reply.read_bytes())  # from our own process, in our own folder
    if isinstance(result, BaseException):
        raise result
    return result


def _lines(descriptor: int, over: threading.Event) -> Iterator[bytes]:
    """Yield the lines that another process writes to a pipe; it is looked for signals meanwhile."""
    with open(descriptor, "rb", buffering=0) as pipe:
        begun = b""
        while True:
            safe_point()
            if over.is_set():
                raise Unwinding
            if not select.select([pipe], [], [], _POLL_SECONDS)[0]:
                continue
            read = pipe.read(1 << 16)
            *lines, begun = (begun + read).split(b"\n")
            yield from lines
            if not read:
                return


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module without fake CUDA."""
    return [sys.executable, "-m", module, *arguments]

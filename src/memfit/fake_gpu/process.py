"""A process with fake CUDA tensors, for one call."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.errors import CaptureError
from memfit.fake_gpu import shim

Progress = Callable[[str, int, int], None]


def run(call: bytes, progress: Progress) -> Any:
    """Return the result of a pickled call that runs in a process with fake CUDA, and report its stages.

    Raises:
        MemfitError: The function raised it there.
        CaptureError: The function raised another error, or the process ended without a reply.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        request.write_bytes(pickle.dumps((sys.path, call)))
        # Stages travel by a pipe of their own: the user's code may print.
        reading, writing = os.pipe()
        line = shim.command("memfit.fake_gpu.worker", str(request), str(reply), str(writing))
        with subprocess.Popen(line, pass_fds=(writing,), stdout=2) as process:
            os.close(writing)
            with open(reading) as stages:
                for stage in stages:
                    progress(*json.loads(stage))
        if not reply.exists():
            raise CaptureError(
                f"the process that predicts for a GPU ended without a reply, with status {process.returncode}: what it"
                " printed stands above (-9 often means that this machine ran out of memory)"
            )
        result = pickle.loads(reply.read_bytes())  # from our own process, in our own folder
    if isinstance(result, BaseException):
        raise result
    return result

"""Calls in processes of their own, with fake CUDA tensors or without.

A process runs `python shim.py memfit.hardware.process REQUEST REPLY STAGES` with fake CUDA, and
`python -m memfit.hardware.process REQUEST REPLY STAGES` without: it writes what a file's call returns to another file,
and its stages to a pipe, since the user's code may print.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from memfit.errors import CaptureError, MemfitError, UntestedTorchWarning
from memfit.foundations import Progress, frames_text, safe_point
from memfit.hardware import shim

T = TypeVar("T")
_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1  # from one look for signals to the next
_NO_REPLY = (
    "the process that predicts ended without a reply, with status {status}: see its output above (-9 often means that"
    " this machine ran out of memory)"
)


def run(call: Callable[[Progress], T], progress: Progress, *, fakes_cuda: bool = True, failure: str = _NO_REPLY) -> T:
    """Return the result of a call that runs in a process of its own; see `run_each`."""
    return run_each([call], progress, fakes_cuda=fakes_cuda, failure=failure)[0]


def run_each(
    calls: Sequence[Callable[[Progress], T]],
    progress: Progress,
    *,
    fakes_cuda: bool = True,
    failure: str = _NO_REPLY,
) -> list[T]:
    """Return the results of calls that run at once, each in a process of its own.

    A process is no rank of any group, even where this one is. Progress is told as that of one call: what they did and
    have to do of a stage is added up.

    Args:
        calls: Functions of their progress, which can be pickled.
        fakes_cuda: Whether CUDA tensors are fake there.
        failure: The error of a process that ended without a reply, with a place for its `{status}`.

    Raises:
        MemfitError: A function raised it there, once all have ended.
        CaptureError: A function raised another error, or its process ended without a reply.
    """
    # Variables by which a launcher such as torchrun numbers its ranks are left out.
    numbered = {name for name in os.environ if name in _LAUNCHERS or name.startswith("TORCHELASTIC_")}
    environment = {name: value for name, value in os.environ.items() if name not in numbered}
    if not fakes_cuda:  # it finds memfit by its name
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    stages: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder, contextlib.ExitStack() as stack:
        processes = []
        begun: dict[tuple[int, int], bytes] = {}  # by place and pipe: what came of its next line
        for index, call in enumerate(calls):
            with open(f"{folder}/request{index}", "wb") as file:
                pickle.dump((sys.path, sys.argv), file)
                pickle.dump(call, file)
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            begun[index, reading] = b""
            given = (__name__, f"{folder}/request{index}", f"{folder}/reply{index}", str(writing))
            line = shim.command(*given) if fakes_cuda else command(*given)
            process = stack.enter_context(subprocess.Popen(line, pass_fds=(writing,), stdout=2, env=environment))
            stack.callback(process.kill)  # does nothing where it was waited for
            processes.append(process)
            os.close(writing)
        while begun:
            safe_point()
            ready = select.select([pipe for _, pipe in begun], [], [], _POLL_SECONDS)[0]
            for index, pipe in [place for place in begun if place[1] in ready]:
                read = os.read(pipe, 1 << 16)
                *lines, begun[index, pipe] = (begun[index, pipe] + read).split(b"\n")
                for stage, done, total in map(json.loads, lines):
                    of_stage = stages[stage]
                    of_stage[index] = done, total
                    progress(stage, sum(done for done, _ in of_stage.values()), sum(of for _, of in of_stage.values()))
                if not read:
                    del begun[index, pipe]
        results: list[Any] = []
        for index, process in enumerate(processes):
            status, reply = process.wait(), Path(folder, f"reply{index}")
            # From our own process, in our own folder.
            ended = CaptureError(failure.format(status=status))
            results.append(pickle.loads(reply.read_bytes()) if reply.exists() else ended)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module without fake CUDA."""
    return [sys.executable, "-m", module, *arguments]


def _answer(request: str, reply: str, stages: str) -> None:
    """Run the call of a file; write its result or its error to another, and its stages to a file descriptor."""
    result: Any
    with open(request, "rb") as file, open(int(stages), "w", buffering=1) as out:
        paths, sys.argv[:] = pickle.load(file)  # modules of the user may read them
        sys.path[:] = [*paths, *(p for p in sys.path if p not in paths)]
        warnings.simplefilter("ignore", UntestedTorchWarning)  # the process that waits has warned
        try:
            result = pickle.load(file)(lambda *stage: print(json.dumps(stage), file=out))
        except MemfitError as e:
            e.frames = frames_text(e)
            result = e
        except (Exception, SystemExit) as e:
            frames = frames_text(e)
            result = CaptureError(f"{type(e).__name__}: {e}" + ("" if frames else f"\n{traceback.format_exc()}"))
            result.frames = frames
    Path(reply).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _answer(*sys.argv[1:])

"""`python -m tests.warm.server FOLDER KIND TRACES`: runs what clients ask for in forks until its input ends."""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from pathlib import Path

IMPORTED = (
    "memfit.cli.app",
    "memfit.cli.training",
    "memfit.hardware.process",
    "memfit.recipes",
    "memfit.report.html",
    "pydantic.type_adapter",  # which Typer's newest asks for as it reads a command line
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
)
"""What nearly every fork would import, beside what memfit's public names bring."""
_MOST_FILES = 64


def main() -> None:
    """Import what forks need, and serve."""
    folder, kind, traces = sys.argv[1:]
    import torch

    import memfit
    from memfit import hardware
    from tests import warm
    from tests.fixed_costs import fixed_costs
    from tests.quick_plans import quick_plans
    from tests.remembered import remembered_captures

    assert memfit.plan
    for name in IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    standing = contextlib.ExitStack()  # for as long as this process serves
    standing.enter_context(fixed_costs())
    standing.enter_context(quick_plans())
    if traces:
        standing.enter_context(remembered_captures(Path(traces)))
    hardware.shim.command = lambda module, *line: warm.fake_cuda_command(module, *line, folder=folder)
    hardware.process.command = lambda module, *line: warm.command("-m", module, *line, folder=folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        if not name.startswith("tests.warm"):
            del sys.modules[name]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    standard = [path for path in sys.path[1:] if path not in given]
    torch.manual_seed(0)  # as tests/conftest.py
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # as tests/conftest.py
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(f"{folder}/{kind}.new")
        listening.listen(16)
        os.rename(f"{folder}/{kind}.new", f"{folder}/{kind}")  # it is there once it can be connected to
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while sys.stdin.fileno() not in {key.fd for key, _ in selector.select()}:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                selector.close()
                _serve(connection, kind, standard)
            connection.close()
            _reap()
    while True:  # so that what they took is counted
        try:
            os.wait()
        except ChildProcessError:
            break


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _serve(connection: socket.socket, kind: str, standard: list[str]) -> None:
    """Run what a client asks for in a fork of this process, and tell its status."""
    files = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(_MOST_FILES * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    count, asked = int.from_bytes(head, "little"), b""
    while len(asked) < count:
        asked += connection.recv(count - len(asked))
    line, folder, environment, numbers = json.loads(asked.decode("utf-8", "surrogateescape"))
    child = os.fork()
    if not child:
        connection.close()
        _take(list(files), numbers)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if kind == "cuda":
            os.environ["MEMFIT_FAKE_CUDA"] = str(os.getpid())
        random.seed(0)  # as tests/conftest.py: Python seeds it anew in a fork, and captures are remembered by its state
        os._exit(_status(line, standard))
    for file in files:
        os.close(file)
    connection.sendall(child.to_bytes(8, "little"))
    has_ended = threading.Event()
    threading.Thread(target=_kill_with, args=(connection, child, has_ended), daemon=True).start()
    _, status = os.waitpid(child, 0)
    has_ended.set()
    code = os.waitstatus_to_exitcode(status)
    connection.sendall(code.to_bytes(8, "little", signed=True))
    os._exit(0)


def _kill_with(connection: socket.socket, child: int, has_ended: threading.Event) -> None:
    """Kill a fork whose client is gone: nobody else knows of it, and it may wait for ever."""
    with contextlib.suppress(ConnectionResetError):  # a client that had not read all
        connection.recv(1)  # it sends nothing more
    if not has_ended.is_set():
        os.kill(child, signal.SIGKILL)


def _take(files: list[int], numbers: list[int]) -> None:
    """Give the files that came the numbers that they had."""
    above = max([*files, *numbers]) + 1
    moved = [os.dup2(file, above + index) for index, file in enumerate(files)]
    os.closerange(0, above)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _status(line: list[str], standard: list[str]) -> int:
    """Run a line as the interpreter does, with all that it does at its end; return the status."""
    for stream, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 1 if number == 2 else -1
        opened = open(number, mode, buffering, closefd=False, errors="backslashreplace" if number == 2 else None)
        setattr(sys, stream, opened)
        setattr(sys, f"__{stream}__", opened)
    status = 0
    try:
        _run(line, standard)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        status = 0 if e.code is None else e.code if isinstance(e.code, int) else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as e:
        e = e.with_traceback(e.__traceback__ and e.__traceback__.tb_next and e.__traceback__.tb_next.tb_next)
        sys.excepthook(type(e), e, e.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF


def _run(line: list[str], standard: list[str]) -> None:
    """Run "-c CODE", "-m MODULE" or a script."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first, *rest = line
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *paths, *standard]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv, sys.path[:] = ["-m", *rest[1:]], [os.getcwd(), *paths, *standard]
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # it is run, and not what was imported
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    else:
        sys.argv, sys.path[:] = [first, *rest], [str(Path(first).resolve().parent), *paths, *standard]
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
        exec(code, vars(main))


if __name__ == "__main__":
    main()

"""One run a folder: other processes are refused and told by whom, and what a dead one left is no lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from memfit.errors import OutputError
from memfit.training import RunOptions, Step, Trainer, held_folder
from tests.processes import on_two_spawned_ranks
from tests.training.conftest import make_plan, make_workload

LOCK = "run.lock"
_LOCKING = "memfit.training.runs.folder"
_HOLDS = """
import multiprocessing, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.signal(signal.SIGINT, signal.default_int_handler)
from memfit.training import held_folder
with held_folder(pathlib.Path(sys.argv[1]), overwrite=True, resume=False):
    if sys.argv[2] == "forks":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
    print("held", flush=True)
    if sys.argv[2] == "raises":
        raise ValueError("of its own")
    time.sleep(60)
"""


@contextlib.contextmanager
def another_process(folder: Path, how: str = "waits") -> Iterator[subprocess.Popen[str]]:
    """Hold a folder in another process."""
    command = [sys.executable, "-c", _HOLDS, str(folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def without_locks(*_: Any) -> None:
    """Stand for `flock` on a file system that has no locks."""
    raise OSError(errno.ENOLCK, "No locks available")


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a folder as a run that begins does."""
    return held_folder(folder, overwrite=True, resume=False)


def here(folder: Path) -> dict[str, Any]:
    """Return the lock that this process writes into a folder."""
    with locked(folder):
        found: dict[str, Any] = json.loads((folder / LOCK).read_bytes())
        return found


def left_by(folder: Path, **changes: Any) -> Path:
    """Write the lock of a run that is not ended: of this process, but for some fields."""
    (folder / LOCK).write_text(json.dumps(here(folder) | changes))
    return folder / LOCK


def is_free(folder: Path) -> bool:
    """Tell whether a folder can be held, and that holding it leaves nothing behind."""
    with contextlib.suppress(OutputError):
        return bool(here(folder)["pid"] == os.getpid())
    return False


@contextlib.contextmanager
def showing_life(path: Path) -> Iterator[None]:
    """Show the signs of life that a run shows, as another host does."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_another_process_is_named_and_each_way_to_end_lets_the_folder_go(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    for number, status in ((signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        with another_process(folder) as process:
            assert said(process) == "held"
            for overwrite, resume in ((False, False), (True, False), (False, True)):
                with pytest.raises(OutputError, match=f"in use by a run of process {process.pid} on host") as caught:
                    with held_folder(folder, overwrite=overwrite, resume=resume):
                        pass
            assert f"kill {process.pid}" in str(caught.value) and "since 2" in str(caught.value)
            process.send_signal(number)
            assert process.wait() == status
        assert (folder / LOCK).exists() == (number == signal.SIGKILL)
        assert is_free(folder)
    assert not (folder / LOCK).exists()


def test_an_exception_lets_the_folder_go_and_leaves_no_empty_one(tmp_path: Path) -> None:
    with another_process(tmp_path / "new" / "run", "raises") as process:
        assert said(process) == "held"
        assert process.wait() == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    assert is_free(tmp_path / "mine")
    assert (tmp_path / "mine").exists()


def test_a_child_that_outlives_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    """As workers of a loader do for seconds."""
    with another_process(tmp_path, "forks") as process:
        child = int(said(process))
        assert said(process) == "held"
        assert not is_free(tmp_path)
        process.kill()
        process.wait()
        assert psutil.pid_exists(child)
        assert is_free(tmp_path)
        os.kill(child, signal.SIGKILL)


def test_a_thread_may_hold_it_twice_and_another_may_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def in_a_thread() -> None:
        with pytest.raises(OutputError) as caught, locked(tmp_path):
            pass
        refused.append(str(caught.value))

    with locked(tmp_path), locked(tmp_path / "x" / ".."):
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
    assert "another thread of this process" in refused[0]
    assert is_free(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"pid": "x"}'])
def test_a_lock_that_can_not_be_read_is_one_only_while_it_is_held(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="in use by a run of another process"), locked(tmp_path):
            pass
    assert is_free(tmp_path)


class TestWithoutTheSystemsLocks:
    """As on some network file systems."""

    @pytest.fixture(autouse=True)
    def no_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", without_locks)
        monkeypatch.setattr(f"{_LOCKING}.SILENT_SECONDS", 0.4)
        monkeypatch.setattr(f"{_LOCKING}._AT_ONCE_SECONDS", 0.05)

    def test_a_process_that_runs_holds_it(self, tmp_path: Path) -> None:
        left_by(tmp_path)
        assert not is_free(tmp_path)

    def test_a_process_that_ended_does_not(self, tmp_path: Path) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        left_by(tmp_path, pid=ended.pid)
        assert is_free(tmp_path)

    def test_a_process_that_was_given_the_id_of_one_that_ended_does_not(self, tmp_path: Path) -> None:
        left_by(tmp_path, started=psutil.Process().create_time() - 60)
        assert is_free(tmp_path)

    def test_two_that_take_it_at_once_do_not_both_have_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = json.dumps(here(tmp_path) | {"pid": 1})
        monkeypatch.setattr(time, "sleep", lambda seconds: (tmp_path / LOCK).write_text(other))
        with pytest.raises(OutputError, match="process 1 on host"), locked(tmp_path):
            pass

    @pytest.mark.parametrize("where", [{"processes": "pid:[7]"}, {"machine": "another kernel", "host": "node-7"}])
    def test_of_a_process_that_can_not_be_seen_signs_of_life_tell(self, where: dict[str, str], tmp_path: Path) -> None:
        """A container whose host has the same name, and another host."""
        left_by(tmp_path, **where)
        assert is_free(tmp_path)
        with showing_life(left_by(tmp_path, **where)):
            assert not is_free(tmp_path)


def test_locks_that_do_not_reach_another_host_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS mounted with `local_lock`: `flock` is had here, while the run on the other host goes on."""
    monkeypatch.setattr(f"{_LOCKING}.SILENT_SECONDS", 0.4)
    left = left_by(tmp_path, machine="another kernel", host="node-7")
    with showing_life(left), pytest.raises(OutputError, match="on host node-7"), locked(tmp_path):
        pass
    assert is_free(tmp_path)


def test_a_run_that_ends_while_another_waits_for_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was opened is removed before it is locked: the lock is taken on a new one."""
    real, calls = fcntl.flock, 0

    def ending(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", ending)
    assert is_free(tmp_path)
    assert calls == 2


def test_a_run_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{_LOCKING}.BEAT_SECONDS", 0.01)
    with locked(tmp_path):
        first, ends = (tmp_path / LOCK).stat().st_mtime_ns, time.monotonic() + 30
        while (tmp_path / LOCK).stat().st_mtime_ns == first:
            assert time.monotonic() < ends
            time.sleep(0.01)


def sharing(rank: int, folder: str) -> Iterator[bool]:
    """Hold a folder on both ranks at once."""
    import torch.distributed as dist

    with locked(Path(folder)):
        dist.barrier()
        yield (Path(folder) / LOCK).exists()
        dist.barrier()


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_of_one_run_share_a_folder(tmp_path: Path) -> None:
    assert on_two_spawned_ranks(sharing, str(tmp_path / "run")) == [[True], [True]]
    assert not (tmp_path / "run" / LOCK).exists()


def _trained(out: Path, on_step: Callable[[Any], None] | None = None, **options: Any) -> None:
    workload = make_workload()
    Trainer(Step(workload), make_plan(workload), RunOptions(out=out, steps=3, on_step=on_step, **options)).fit()


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_a_live_run_is_neither_replaced_nor_gone_on_with(options: dict[str, bool], tmp_path: Path) -> None:
    out = tmp_path / "run"
    _trained(out)
    before = sorted(path.name for path in out.iterdir())
    with another_process(out) as process:
        assert said(process) == "held"
        with pytest.raises(OutputError, match=f"process {process.pid}"):
            _trained(out, **options)
        assert sorted(path.name for path in out.iterdir()) == sorted([*before, LOCK])
        assert json.loads((out / "run.json").read_bytes())["status"] == "finished"
    _trained(out, **options)
    assert sorted(path.name for path in out.iterdir()) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(75), ValueError])
def test_a_run_that_fails_lets_its_folder_go(error: Any, tmp_path: Path) -> None:
    def fail(progress: Any) -> None:
        assert (tmp_path / LOCK).exists()
        raise error

    with pytest.raises((KeyboardInterrupt, SystemExit, ValueError)):
        _trained(tmp_path, fail)
    assert not (tmp_path / LOCK).exists()
    assert is_free(tmp_path)

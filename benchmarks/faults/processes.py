"""Children of a process that has imported everything: each starts in milliseconds, and dies alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from memfit.errors import MemfitError

MAX_SECONDS = 120.0
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def start(work: Callable[[], None], log: Path) -> int:
    """Fork a child that does some work, and return its process id. It writes what it says to a file.

    Its exit status is that of the `memfit` command: see `memfit.errors`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except MemfitError as e:
        status = e.exit_status
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, seconds: float = MAX_SECONDS) -> int | None:
    """Return the exit status of a child, negative for the signal that ended it; None if it runs on after that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def finish(pid: int, seconds: float = MAX_SECONDS) -> int:
    """Return the exit status of a child, which is killed when it takes too long."""
    status = wait(pid, seconds)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status


def mount_small_disk(place: Path, size_bytes: int) -> bool:
    """Mount a tmpfs that only this process and its children see; tell whether the system allows it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if user != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    elif libc.unshare(_CLONE_NEWNS):
        return False
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    return not libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, f"size={size_bytes}".encode())

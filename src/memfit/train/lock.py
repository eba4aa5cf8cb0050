"""The lock of a run's folder: of two processes that would write to it, the second is refused, and told of the first.

Three things tell whether a run is alive, each where the one before can't:

1. The operating system's lock (`flock`) on `run.lock`. It goes with the process, whatever ends it, `kill -9` included;
   Linux passes it on to an NFS server. Nothing is stale then, and no process id is trusted.
2. Where the file system has no such locks, the process that the file names: its id and the time at which it began,
   since ids are used again.
3. Of a process that can't be seen from here, on another host or in another container, whether the file's modification
   time moves: the run moves it every few seconds. No clocks are compared, which differ between hosts.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import multiprocessing
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from memfit.errors import OutputError

LOCK = "run.lock"
BEAT_SECONDS = 4.0
"""Between two signs of life."""
SILENT_SECONDS = 14.0
"""Without a sign of life, a process that can't be seen is taken for dead."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_AT_ONCE_SECONDS = 0.5  # in which a process that takes a lock has written who it is
_SAME_START_SECONDS = 1.0  # what the start of a process may differ by when it is read twice

_log = logging.getLogger("memfit")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a folder.

    Attributes:
        pid: Its id.
        started: When it began, in seconds since the epoch.
        host: The host's name.
        machine: What tells hosts of one name apart: the running kernel's own identity.
        processes: What tells containers of one host apart: the space of the process ids.
        group: The ranks that it trains with, by whom the folder is shared; "" alone.
        since: When it took the folder, in ISO 8601.
        command: How it was called.
    """

    pid: int
    started: float
    host: str
    machine: str
    processes: str
    group: str
    since: str
    command: str

    @classmethod
    def here(cls) -> Holder:
        """Return what this process is."""
        return cls(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            host=socket.gethostname(),
            machine=_machine(),
            processes=_process_space(),
            group=_group(),
            since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:300],
        )

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since} ({self.command})"


_held: dict[Path, tuple[int, int]] = {}  # by folder: the thread that holds it, and the open file
_guard = threading.Lock()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process while the context is entered; it is made if it is not there.

    The thread that holds it may enter it again. Ranks of one process group may share it.

    Args:
        folder: The run's folder. When it was made here and is empty at the end, it is removed again.

    Raises:
        OutputError: Another process, or another thread of this one, holds it; or it can't be written.
    """
    folder = folder.resolve()
    with _guard:
        holding = _held.get(folder)
    if holding is not None:
        if holding[0] != threading.get_ident():
            raise _refusal(folder, Holder.here(), "another thread of this process")
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(folder / LOCK, Holder.here())
    except OSError as e:
        _remove_empty(made)
        raise OutputError(f"can't write to out={str(folder)!r}: {e.strerror or e}") from e
    if descriptor is None:  # another rank of this run holds it
        yield
        return
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(folder / LOCK, descriptor, over), name="memfit-lock", daemon=True)
    with _guard:
        _held[folder] = threading.get_ident(), descriptor
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()
        with _guard:
            is_held = _held.pop(folder, None) is not None
        if is_held:  # not in a process that was forked, which holds nothing
            _release(folder / LOCK, descriptor)
            _remove_empty(made)


def holder_of(folder: Path) -> Holder | None:
    """Return what the lock of a folder says, or None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / LOCK).read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _acquire(path: Path, own: Holder) -> int | None:
    """Return an open and locked file with what this process is in it; None where a rank of the same run holds it.

    Raises:
        OutputError: Another process holds it.
    """
    ends = time.monotonic() + _AT_ONCE_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            outcome = _try(path, descriptor, own)
        except BaseException:
            os.close(descriptor)
            raise
        if outcome == "held":
            return descriptor
        os.close(descriptor)
        if outcome == "shared":
            return None
        if time.monotonic() > ends:
            raise _refusal(path.parent, own, "another process")
        time.sleep(_AT_ONCE_SECONDS / 10)


def _try(path: Path, descriptor: int, own: Holder) -> Literal["held", "shared", "again"]:
    """Try to take the lock; "again" where it is being taken, or let go, at this moment.

    Raises:
        OutputError: Another process holds it.
    """
    is_locked = _lock(descriptor)
    found = holder_of(path.parent)
    if is_locked is False and (found is None or _has_ended(found, own)):
        return "again"  # who has it has not written yet who it is
    if found is not None and _is_alive(path, found, own, is_locked):
        if own.group and own.group == found.group:
            return "shared"
        raise _refusal(path.parent, own, str(found), found)
    if not _is_at(path, descriptor):
        return "again"  # the run that held it has ended, and removed it, since
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(own), 0)
    except OSError:  # the disk is full
        path.unlink()
        raise
    if is_locked is None:  # of two that take it at once, the last to write has it
        time.sleep(_AT_ONCE_SECONDS)
        if (found := holder_of(path.parent)) != own:
            raise _refusal(path.parent, own, str(found), found)
    return "held"


def _lock(descriptor: int) -> bool | None:
    """Tell whether the operating system's lock could be had; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno in _NO_LOCKS:
            return None
        raise


def _is_alive(path: Path, found: Holder, own: Holder, is_locked: bool | None) -> bool:
    """Tell whether the process that a lock's file names still runs.

    Args:
        path: The file.
        found: The process.
        own: This process.
        is_locked: Whether this process has the operating system's lock; None where there is none.
    """
    if is_locked is False:
        return True
    if found.machine == own.machine:
        if is_locked:  # on one machine that lock is certain
            return False
        if found.processes == own.processes:
            return not _has_ended(found, own)
    return _beats(path, found)


def _has_ended(found: Holder, own: Holder) -> bool:
    """Tell whether a process can be seen to run no more; one of its id that began at another time is another."""
    if (found.machine, found.processes) != (own.machine, own.processes):
        return False
    try:
        started: float = psutil.Process(found.pid).create_time()
        return abs(started - found.started) > _SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _beats(path: Path, found: Holder) -> bool:
    """Tell whether a run shows a sign of life: the file's modification time moves."""
    _log.warning("%s is held by %s, which can't be seen from here: waiting for a sign of life", path.parent, found)
    first, ends = _modified(path), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < ends:
        if _modified(path) != first:
            return True
        time.sleep(SILENT_SECONDS / 20)
    return False


def _modified(path: Path) -> int:
    """Return a file's modification time; opened for it, so that NFS asks the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _beat(path: Path, descriptor: int, over: threading.Event) -> None:
    """Show signs of life, until it is over."""
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _release(path: Path, descriptor: int) -> None:
    """Remove the file, then let the lock go: who waits for the lock then sees that the file is another."""
    with contextlib.suppress(OSError):
        if _is_at(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_empty(made: list[Path]) -> None:
    """Remove folders that are empty still, the innermost first."""
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def _after_fork() -> None:
    """Let a process that was forked, such as a loader's worker, hold nothing: it may outlive the one that does."""
    global _guard
    _guard = threading.Lock()
    for _, descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _refusal(folder: Path, own: Holder, who: str, found: Holder | None = None) -> OutputError:
    what_to_do = "give this one another out=, or wait until it ends, or stop it"
    if found is not None and found.machine == own.machine and found.processes != own.processes:
        what_to_do += " (it is in another container of this host)"
    elif found is not None and found.machine == own.machine:
        what_to_do += f" (kill {found.pid}; it then writes a checkpoint, which resume=True goes on from)"
    return OutputError(f"out={str(folder)!r} is in use by a run of {who}: {what_to_do}. Nothing was changed")


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, up since {psutil.boot_time():.0f}"


def _process_space() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _group() -> str:
    """Return what tells the ranks of one run from others: where they meet, or the process that started them."""
    dist = sys.modules.get("torch.distributed")  # who has not imported it has no ranks
    if dist is None or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if address and port:
        place = f"{_machine()} " if address in ("localhost", "127.0.0.1", "::1") else ""
        return f"{place}{address}:{port} {os.environ.get('TORCHELASTIC_RUN_ID', '')}".strip()
    parent = multiprocessing.parent_process()
    return f"children of {parent.pid} on {_machine()}" if parent is not None else ""

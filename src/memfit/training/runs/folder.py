"""The folder of a run: checks that a run may write to it, its lock, and removes only memfit's own files.

The second of two processes that would write to a folder is refused, with the first's name. Whether a run is alive is
found out by three means, each where the one before is not available:

1. The operating system's lock (`flock`) on `run.lock`. It ends with the process, after `kill -9` too; Linux passes it
   on to an NFS server. So no lock is stale, and no process id is trusted.
2. On file systems without such locks, the process that the file names: its id and its start time, since ids are reused.
3. For a process on another host or in another container, changes of the file's modification time: the run updates it
   every few seconds. No clocks are compared, since they differ between hosts.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import multiprocessing
import os
import re
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

from memfit.errors import CheckpointError, OutputError, UsageError
from memfit.ranks import SingleProcess, once
from memfit.training.guards.recovery import all_snapshots
from memfit.training.runs import checkpoint
from memfit.training.runs.log import read_lines

RUN, PLAN, METRICS, TENSORBOARD = "run.json", "plan.json", "metrics.jsonl", "tensorboard"
VIEWS, REPORT = "views.json", "report.html"
_FILES = (METRICS, RUN, PLAN, VIEWS, REPORT)
_TEMPORARY = re.compile(r"\..*\.tmp")
LOCK = "run.lock"
BEAT_SECONDS = 4.0
"""Between two updates of the modification time."""
SILENT_SECONDS = 14.0
"""Without an update, a process on another host or in another container counts as dead."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_AT_ONCE_SECONDS = 0.5  # within which a process that takes the lock has written its name
_SAME_START_SECONDS = 1.0  # tolerance between two readings of a process's start time
_log = logging.getLogger("memfit")


@contextlib.contextmanager
def held_folder(out: Path, *, overwrite: bool, resume: bool, ranks: SingleProcess | None = None) -> Iterator[None]:
    """Lock and check a folder for a run while the context is entered; the first rank does it for all.

    Raises:
        OutputError: Another run holds the folder; and all that `check_folder` raises.
    """
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            _check_usable(out, overwrite=overwrite, resume=resume)
            stack.enter_context(locked(out))
            check_folder(out, overwrite=overwrite, resume=resume)

        once(ranks or SingleProcess(), hold)
        yield


def is_begun(out: Path) -> bool:
    """Tell whether a folder holds a checkpoint, whole or not, of a run that can go on."""
    return out.is_dir() and bool(checkpoint.newest_first(out) or checkpoint.all_set_aside(out))


def holds_a_start(out: Path) -> bool:
    """Tell whether a folder holds the files of a run, all of them memfit's."""
    names = [path.name for path in out.iterdir() if path.name != LOCK] if out.is_dir() else []
    return bool(names) and all(name in (*_FILES, TENSORBOARD) or _TEMPORARY.fullmatch(name) for name in names)


def check_folder(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Check that a run may be written to a folder; nothing is changed.

    Raises:
        UsageError: Both `overwrite` and `resume` are given.
        OutputError: The folder can't be written, or holds files that must not be overwritten.
        CheckpointError: There is nothing to resume from.
    """
    _check_usable(out, overwrite=overwrite, resume=resume)
    try:
        names = sorted(path.name for path in out.iterdir() if path.name != LOCK) if out.exists() else []
    except OSError as e:
        raise OutputError(f"can't read out={str(out)!r}: {e.strerror or e}") from e
    if resume:
        newest = checkpoint.latest(out)
        if newest is None:
            raise CheckpointError(f"out={str(out)!r} has no complete checkpoint: start again with overwrite=True")
        _check_only_own_in_the_way(out, after_step=checkpoint.step_of(newest) or 0)
    elif names and not overwrite:
        raise OutputError(
            f"out={str(out)!r} is not empty; it has {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: give"
            " another out=, overwrite=True to replace the run in it, or resume=True to continue it"
        )
    elif names:
        _check_only_own_in_the_way(out)


def clear_folder(out: Path) -> None:
    """Remove the run in a folder. Files that memfit did not write stay."""
    try:
        for path in [*checkpoint.newest_first(out), *checkpoint.all_set_aside(out)]:
            if checkpoint.is_ours(path):
                checkpoint.remove(path)
            elif checkpoint.step_of(path) is not None:
                checkpoint.set_aside(path)
        remove_leftovers(out)
        for path in [*all_snapshots(out), *(out / name for name in _FILES)]:
            path.unlink(missing_ok=True)
        events = out / TENSORBOARD
        for path in events.glob("events.out.tfevents.*"):
            path.unlink()
        if events.is_dir() and not any(events.iterdir()):
            events.rmdir()
    except OSError as e:
        raise OutputError(f"can't replace the run in out={str(out)!r}: {e.strerror or e}") from e


def remove_leftovers(out: Path) -> None:
    """Remove temporary files that a crash left behind."""
    checkpoint.remove_leftovers(out)
    for path in (path for name in (*_FILES, "out-of-memory-*.pickle") for path in out.glob(f".{name}.*.tmp")):
        path.unlink(missing_ok=True)


def _check_usable(out: Path, *, overwrite: bool, resume: bool) -> None:
    if overwrite and resume:
        raise UsageError("overwrite=True and resume=True contradict each other: give one of them")
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"can't write to out={str(out)!r}: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"can't write to out={str(out)!r}: no permission to write to {existing}")


def _check_only_own_in_the_way(out: Path, *, after_step: int = -1) -> None:
    """Raise OutputError if the run would overwrite files that memfit did not write; checkpoints come after a step."""
    after = [path for path in checkpoint.newest_first(out) if (checkpoint.step_of(path) or 0) > after_step]
    foreign = [path for path in after if not checkpoint.holds_only_ours(path)]
    foreign += [path for name in (RUN, PLAN) if (path := out / name).exists() and not checkpoint.has_schema(path)]
    if foreign:
        raise OutputError(f"{foreign[0]} exists, and memfit did not write it: move it, or give another out=")
    read_lines(out / METRICS)


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a folder.

    Attributes:
        started: Its start time, in seconds since the epoch.
        machine: Identity of the running kernel, which distinguishes hosts of the same name.
        processes: The process id namespace, which distinguishes containers on a host.
        group: The group of ranks that it trains with and that share the folder; "" for a single process.
        since: Time at which it took the lock, in ISO 8601.
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
    def here(cls) -> LockHolder:
        """Make the record of this process."""
        processes = ""
        with contextlib.suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        program, *words = sys.argv or [""]  # none where Python is embedded
        group, dist = "", sys.modules.get("torch.distributed")  # not imported: no ranks
        if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # The ranks' rendezvous, or the process that started them.
            address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            parent = multiprocessing.parent_process()
            if address and port:
                place = f"{_machine()} " if address in ("localhost", "127.0.0.1", "::1") else ""
                group = f"{place}{address}:{port} {os.environ.get('TORCHELASTIC_RUN_ID', '')}".strip()
            elif parent is not None:
                group = f"children of {parent.pid} on {_machine()}"
        return cls(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            host=socket.gethostname(),
            machine=_machine(),
            processes=processes,
            group=group,
            since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=shlex.join([Path(program).name, *words])[:300],
        )

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since} ({self.command})"


_held: dict[Path, tuple[int, int]] = {}  # by folder: the thread that holds it, and the open file
_guard = threading.Lock()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process while the context is entered; a missing folder is created.

    The thread that holds it may enter it again. Ranks of one process group may share it. A folder that was created here
    and is empty at the end is removed again.
    """
    folder = folder.resolve()
    with _guard:
        holding = _held.get(folder)
    if holding is not None:
        if holding[0] != threading.get_ident():
            raise _refusal(folder, LockHolder.here(), "another thread of this process")
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(folder / LOCK, LockHolder.here())
    except OSError as e:
        _remove_empty(created)
        raise OutputError(f"can't write to out={str(folder)!r}: {e.strerror or e}") from e
    if descriptor is None:  # another rank of this run holds it
        yield
        return
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    beating = threading.Thread(target=beat, name="memfit-lock", daemon=True)
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
        if is_held:  # a forked process holds nothing
            with contextlib.suppress(OSError):  # before the lock is released: who waits for it sees another file
                if _is_at(folder / LOCK, descriptor):
                    (folder / LOCK).unlink()
            os.close(descriptor)
            _remove_empty(created)


def holder_of(folder: Path) -> LockHolder | None:
    """Return the holder named in a folder's lock file; None where it can't be read."""
    try:
        return msgspec.json.decode((folder / LOCK).read_bytes(), type=LockHolder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _acquire(path: Path, own: LockHolder) -> int | None:
    """Open and lock the file, and write this process's record; return None where a rank of the same run holds it."""
    ends = time.monotonic() + _AT_ONCE_SECONDS
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            outcome = _try(path, descriptor, own)
            if outcome == "held":
                stack.pop_all()
                return descriptor
        if outcome == "shared":
            return None
        if time.monotonic() > ends:
            raise _refusal(path.parent, own, "another process")
        time.sleep(_AT_ONCE_SECONDS / 10)


def _try(path: Path, descriptor: int, own: LockHolder) -> Literal["held", "shared", "again"]:
    """Try to take the lock; return "again" where it is being taken or released at this moment."""
    is_locked: bool | None = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_locked = False
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
        is_locked = None  # the file system has no locks
    holder = holder_of(path.parent)
    if is_locked is False and (holder is None or _has_ended(holder, own)):
        return "again"  # the holder has not written its name yet
    is_alive = is_locked is False
    if holder is not None and not is_alive and holder.machine != own.machine:
        is_alive = _beats(path, holder)
    elif holder is not None and not is_alive and not is_locked:  # on one machine that lock is certain
        same = holder.processes == own.processes
        is_alive = not _has_ended(holder, own) if same else _beats(path, holder)
    if holder is not None and is_alive:
        if own.group and own.group == holder.group:
            return "shared"
        raise _refusal(path.parent, own, str(holder), holder)
    if not _is_at(path, descriptor):
        return "again"  # the run that held it has ended since, and removed the file
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(own), 0)
    except OSError:  # the disk is full
        path.unlink()
        raise
    if is_locked is None:  # if two take it at once, the last to write has it
        time.sleep(_AT_ONCE_SECONDS)
        if (holder := holder_of(path.parent)) != own:
            raise _refusal(path.parent, own, str(holder), holder)
    return "held"


def _has_ended(holder: LockHolder, own: LockHolder) -> bool:
    """Tell whether a process on this host has ended; one with its id and another start time is another process."""
    if (holder.machine, holder.processes) != (own.machine, own.processes):
        return False
    try:
        started: float = psutil.Process(holder.pid).create_time()
        return abs(started - holder.started) > _SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _beats(path: Path, holder: LockHolder) -> bool:
    """Tell whether a run is alive: it updates the file's modification time."""

    def modified() -> int:
        try:
            with path.open("rb") as file:  # opening it makes NFS ask the server
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return 0

    _log.warning(
        "%s is in use by %s, on another host or in another container: waiting to see whether that run still writes",
        path.parent,
        holder,
    )
    first, ends = modified(), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < ends:
        if modified() != first:
            return True
        time.sleep(SILENT_SECONDS / 20)
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_empty(made: list[Path]) -> None:
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def _after_fork() -> None:
    """Make a forked process, such as a loader's worker, release the locks: it may outlive their holder."""
    global _guard
    _guard = threading.Lock()
    for _, descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _refusal(folder: Path, own: LockHolder, who: str, holder: LockHolder | None = None) -> OutputError:
    what_to_do = "give another out=, wait until that run ends, or stop it"
    if holder is not None and holder.machine == own.machine and holder.processes != own.processes:
        what_to_do += " (it is in another container of this host)"
    elif holder is not None and holder.machine == own.machine:
        what_to_do += f" (kill {holder.pid}; that run then writes a checkpoint, and resume=True continues from it)"
    return OutputError(f"out={str(folder)!r} is in use by a run of {who}: {what_to_do}. Nothing was changed")


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, up since {psutil.boot_time():.0f}"

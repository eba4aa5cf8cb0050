"""Ranks over gloo, each a process of its own on this machine: a fork of the warm server."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests import warm

WORLD_SIZE = 2
_WAITS = timedelta(seconds=200)
"""How long ranks wait for one another."""
_HANGS = 300.0
"""Seconds after which a rank tells where it is, and ends."""


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def on_two_ranks(program: Callable[..., Iterable[Any]], *args: Any) -> list[list[Any]]:
    """Run a program in two processes that are in one process group; see `on_ranks`."""
    return on_ranks(WORLD_SIZE, program, *args)


def on_ranks(world_size: int, program: Callable[..., Iterable[Any]], *args: Any) -> list[list[Any]]:
    """Run a program in processes that are in one process group.

    Args:
        world_size: Number of processes.
        program: `program(rank, *args)` yields its results; a function of a module.
        args: What pickle can send.

    Returns:
        What each rank yielded, by rank.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(free_port())
        (folder / "program").write_bytes(pickle.dumps((program, args)))
        given = [str(world_size), port, name]
        lines = [warm.command("-m", "tests.processes", str(rank), *given) for rank in range(world_size)]
        ranks = [subprocess.Popen(line, cwd=warm.ROOT) for line in lines]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):  # which the others would wait for
                    for rank in ranks:
                        rank.terminate()
                time.sleep(0.05)
        finally:
            for rank in ranks:  # a test's time may be over: what hangs would be waited for by all that follows
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0] * world_size, "a rank failed: see what it wrote"
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def on_two_spawned_ranks(program: Callable[..., Iterable[Any]], *args: Any) -> list[list[Any]]:
    """Run a program as `on_two_ranks` does, in processes that `torch.multiprocessing` starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program").write_bytes(pickle.dumps((program, args)))
        multiprocessing.spawn(_spawned, args=(free_port(), folder), nprocs=WORLD_SIZE)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(WORLD_SIZE)]


def _spawned(rank: int, port: int, folder: Path) -> None:
    _main(rank, WORLD_SIZE, port, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # on a busy machine, threads of gloo that outlive the group abort a process that ends by itself


def _main(rank: int, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_HANGS, exit=True)
    program, args = pickle.loads((folder / "program").read_bytes())
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_WAITS)
    try:
        found = list(program(rank, *args))
    finally:
        dist.destroy_process_group()
    (folder / str(rank)).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

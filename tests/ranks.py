"""Two ranks over gloo, each a process of its own on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

WORLD_SIZE = 2


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def on_two_ranks(program: Callable[..., Iterable[Any]], *args: Any) -> list[list[Any]]:
    """Run a program in two processes that are in one process group.

    Args:
        program: `program(rank, *args)` yields its results; a function of a module.
        args: What pickle can send.

    Returns:
        What each rank yielded, by rank.
    """
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank_main, args=(free_port(), queue, program, args), nprocs=WORLD_SIZE)
    found: list[list[Any]] = [[] for _ in range(WORLD_SIZE)]
    while not queue.empty():
        rank, result = queue.get()
        found[rank].append(result)
    return found


def _rank_main(rank: int, port: int, queue: Any, program: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    try:
        for result in program(rank, *args):
            queue.put((rank, result))
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # on a busy machine, threads of gloo that outlive the group abort a process that ends by itself

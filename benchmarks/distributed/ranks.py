"""Ranks for benchmarks: processes of this machine in one gloo group, each of one thread."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def on_ranks(
    world_size: int, program: Callable[..., Iterator[Any]], *args: Any, longest_seconds: float = math.inf
) -> Iterator[Any]:
    """Yield what the first of some ranks yields of `program(*args)`, which runs on each.

    Raises:
        RuntimeError: A rank ended with an error.
        TimeoutError: Nothing came for longer than `longest_seconds`, once the ranks had found each other.
    """
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    context = processes.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [
        context.Process(target=_as_rank, args=(rank, world_size, port, queue, program, args))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    seconds_to_end = 0.0
    waits_seconds = math.inf
    try:
        while True:
            began = time.monotonic()
            while queue.empty():
                if time.monotonic() - began > waits_seconds:
                    raise TimeoutError(f"nothing came of {world_size} ranks for {longest_seconds:g} s")
                if any(rank.exitcode for rank in ranks):
                    raise RuntimeError(f"a rank of {world_size} ended with an error")
                time.sleep(0.01)
            kind, value = queue.get()
            if kind == "begin":
                waits_seconds = longest_seconds
                continue
            if kind == "end":
                seconds_to_end = 10.0
                break
            yield value
    finally:
        for rank in ranks:
            rank.join(timeout=seconds_to_end)
            rank.kill()


def _as_rank(
    rank: int, world_size: int, port: int, queue: Any, program: Callable[..., Iterator[Any]], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    if rank == 0:
        queue.put(("begin", None))
    for value in program(*args):
        if rank == 0:
            queue.put(("value", value))
    dist.barrier()
    if rank == 0:
        queue.put(("end", None))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo that outlive the group abort a process that ends by itself


def of_all_ranks(value: int) -> list[int]:
    """Return a number of each rank."""
    own = torch.tensor([value])
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [int(number) for number in found]

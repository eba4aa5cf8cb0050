"""Joining the ranks that a launcher such as torchrun has started, by the variables that it sets."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from memfit.errors import RankError
from memfit.ranks.environment import is_launched, launched_by_torchrun, launched_rank, launched_size, local_rank
from memfit.ranks.group import Group
from memfit.ranks.mesh import is_joined
from memfit.ranks.one_process import SingleProcess

_ATTEMPT = "memfit/attempt"
_JOIN_SECONDS = 1800.0  # as long as PyTorch waits by default
_POLL_SECONDS = 0.02


@contextlib.contextmanager
def joined(kind: str) -> Iterator[SingleProcess]:
    """Be a rank of the default process group until the context is left.

    It is joined here where a launcher has started this process and nobody has joined yet, and then left at the end. On
    accelerators each rank takes the one of its number on its host.

    Args:
        kind: Of the devices that train ("cpu", "cuda").
    """
    if is_joined() or not is_launched():
        yield Group(kind) if is_joined() else SingleProcess()
        return
    place = None if kind == "cpu" else torch.device(kind, local_rank())
    if place is not None:
        torch.accelerator.set_device_index(local_rank())
    backend = dist.get_default_backend_for_device(kind)
    if launched_by_torchrun():
        dist.init_process_group(
            backend, store=_store_of_attempt(), rank=launched_rank(), world_size=launched_size(), device_id=place
        )
    else:
        dist.init_process_group(backend, device_id=place)
    is_done = False
    try:
        yield Group(kind)
        is_done = True
    finally:
        # After an error the others may be within a collective, and NCCL would wait for them.
        if is_joined() and (is_done or backend == "gloo"):
            dist.destroy_process_group()


def _store_of_attempt() -> Store:
    """Return the store of the ranks that torchrun has started together, and of no others.

    In PyTorch 2.13 torchrun keeps one store for all that it starts, one after the other, without a prefix for each. So
    ranks that it started again read addresses of those before them, and wait for these. Here the first rank names the
    attempt, and goes on when each of the others has answered to this name; each other one goes on when the first has
    seen its answer, and looks for a newer name until then.
    """
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, own = launched_rank(), uuid.uuid4().hex
    if rank == 0:
        store.set(_ATTEMPT, own)
        for other in range(1, launched_size()):
            answer = f"{own}/{other}"
            _wait(functools.partial(store.check, [answer]))
            store.set(f"{own}/{store.get(answer).decode()}", "seen")
        return PrefixStore(own, store)
    named = ""

    def is_seen() -> bool:
        nonlocal named
        if store.check([_ATTEMPT]) and (newest := store.get(_ATTEMPT).decode()) != named:
            named = newest
            store.set(f"{named}/{rank}", own)
        return bool(named) and store.check([f"{named}/{own}"])

    _wait(is_seen)
    return PrefixStore(named, store)


def _wait(is_there: Callable[[], bool]) -> None:
    ends = time.monotonic() + _JOIN_SECONDS
    while not is_there():
        if time.monotonic() > ends:
            raise RankError(f"other ranks did not start within {_JOIN_SECONDS:.0f} s: read their output")
        time.sleep(_POLL_SECONDS)

"""Process groups and their meshes: joined ones, and fake ones with which one process captures the step of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit._torch import fake_ranks
from memfit.errors import RankError, UsageError
from memfit.ir import Sharding
from memfit.ranks.environment import is_launched, launched_by_torchrun, launched_rank, launched_size, local_rank
from memfit.ranks.group import Group, SingleProcess
from memfit.workload import Workload, part_of, samples_of


def is_joined() -> bool:
    """Tell whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def kind_of_group() -> str:
    """Return the kind of the devices that the default process group sends from ("cpu", "cuda")."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type


@contextlib.contextmanager
def fake_mesh(sharding: Sharding, device_type: str) -> Iterator[DeviceMesh]:
    """Yield a mesh of ranks that are not there, for the first of them: it holds most where shards are uneven.

    Collectives of PyTorch's "fake" backend send nothing and take no time. Enter it outside of fake tensors' modes:
    meshes read values.

    Raises:
        UsageError: This process is a rank of real ones.
    """
    if is_joined():
        raise UsageError(
            "a process in a process group can't capture the step of several ranks: plan before"
            " torch.distributed.init_process_group, or load a plan"
        )
    with fake_ranks(sharding.world_size):
        yield mesh_of(sharding, device_type)


def check_size(sharding: Sharding, world_size: int) -> None:
    """Raise UsageError unless there are as many ranks as a sharding is for."""
    if world_size != sharding.world_size:
        there = f"are {world_size} ranks" if world_size > 1 else "is one process"
        raise UsageError(
            f"the plan is for world_size={sharding.world_size}, and there {there}: start {sharding.world_size}"
            f" processes with torchrun --nproc-per-node, or make a plan with world_size={world_size}"
        )


def mesh_of(sharding: Sharding, device_type: str) -> DeviceMesh:
    """Return the mesh of a sharding over all ranks of the default process group: replicas, then shards.

    Raises:
        UsageError: There are more or fewer ranks.
    """
    check_size(sharding, dist.get_world_size())
    world_size = sharding.world_size
    if sharding.replicas == 1 or not sharding.is_fully_sharded:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shards",))
    shape = (sharding.replicas, sharding.shards)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards"))


def of_one_rank(workload: Workload, world_size: int) -> Workload:
    """Return a workload with the largest part of its batch that a rank runs; the whole batch's storages stay held."""
    return with_samples(workload, -(-samples_of(workload) // world_size))


def with_samples(workload: Workload, samples: int) -> Workload:
    """Return a workload with the first samples of its batch; the whole batch's storages stay held."""
    if samples == samples_of(workload):
        return workload
    counted = workload.batch_size if callable(workload.batch_size) or workload.batch_size is None else samples
    return dataclasses.replace(workload, batch=part_of(workload, workload.batch, 0, samples), batch_size=counted)


_ATTEMPT = "memfit/attempt"
_JOIN_SECONDS = 1800.0  # as long as PyTorch waits by default
_POLL_SECONDS = 0.02


@contextlib.contextmanager
def joined(kind: str) -> Iterator[SingleProcess]:
    """Be a rank of the default process group until the context is left.

    It is joined here where a launcher has started this process and nobody has joined yet, and then left at the end. On
    accelerators each rank takes the one of its number on its host.
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

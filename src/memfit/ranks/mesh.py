"""Meshes of ranks: of those that are there, and of fake ones, with which one process captures the step of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit._torch.distributed import fake_ranks
from memfit.errors import UsageError
from memfit.ir.sharding import Sharding
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

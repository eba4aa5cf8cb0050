"""What memfit relies on of shared tensors, and of ranks that are not there."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch.distributed import _meta_registrations
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from memfit._torch import distributed


def test_is_shared_local_part_chunk_of_and_is_first_copy_see_through_a_dtensor() -> None:
    """A part has the place that DTensor tells checkpoints; a copy is the first where no replica comes before."""
    own = torch.ones(2, 3)
    with distributed.fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False)
        assert tensor.shape == (4, 3)
        assert distributed.is_shared(type(tensor)) and not distributed.is_shared(torch.Tensor)
        assert torch.equal(distributed.local_part(tensor), own) and distributed.local_part(own) is own
        assert distributed.chunk_of(tensor) == ([0, 0], [2, 3])
        assert distributed.is_first_copy(tensor)


def test_fake_ranks_draw_nothing_and_are_gone_afterwards() -> None:
    """PyTorch numbers collectives under fake tensors by `generate_unique_id`, which draws from Python's generator."""
    before, number = random.getstate(), _meta_registrations.generate_unique_id
    with distributed.fake_ranks(3):
        assert dist.get_world_size() == 3 and dist.get_rank() == 0
        assert _meta_registrations.generate_unique_id is not number
    assert not dist.is_initialized() and _meta_registrations.generate_unique_id is number
    assert random.getstate() == before

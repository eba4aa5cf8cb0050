"""Gathers and reductions in place over gloo: the values of gloo's own, no copies, and nothing held afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from memfit.hardware import allocated
from memfit.ranks.engines import Gather, ReduceScatter
from tests.processes import on_ranks

COUNT = 40_000


def gathered(rank: int) -> Iterator[tuple[bool, int]]:
    """Gather from a tensor of its own, and from its place in the output as `fully_shard` does."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    given = torch.arange(COUNT // ranks, dtype=torch.float32) + 1000 * rank
    expected = torch.empty(COUNT)
    dist.all_gather_into_tensor(expected, given)
    for within in (False, True):
        output = torch.zeros(COUNT)
        part = output.chunk(ranks)[rank].copy_(given) if within else given
        with allocated() as meter:
            Gather()(output, part, group)
        yield torch.equal(output, expected), meter.peak_bytes


def reduced(rank: int) -> Iterator[tuple[bool, int, int]]:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        given = torch.rand(COUNT, generator=torch.Generator().manual_seed(rank))
        expected, output = torch.empty(COUNT // ranks), torch.empty(COUNT // ranks)
        dist.reduce_scatter_tensor(expected, given.clone(), op=op)
        gc.collect()
        with allocated() as meter:
            for _ in range(20):  # each let go by all threads before the next
                made = given.clone()
                ReduceScatter()(output, made, group, op)
                del made
        yield torch.equal(output, expected), meter.peak_bytes, meter.net_bytes


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_arrives_is_what_gloo_itself_sends_without_a_copy(world_size: int) -> None:
    for rank in on_ranks(world_size, gathered):
        assert [same for same, _ in rank] == [True, True]
        assert max(nbytes for _, nbytes in rank) < 1024
    for rank in on_ranks(world_size, reduced):
        for same, peak_bytes, net_bytes in rank:
            assert same and net_bytes == 0
            assert peak_bytes < 4 * COUNT + 1024, "one of them at a time"

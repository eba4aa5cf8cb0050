"""What memfit relies on of shared tensors, of both engines, and of fake process groups."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _meta_registrations
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from memfit import _torch
from memfit.hardware import allocated
from tests.processes import free_port

RESETS = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="new in torch 2.13")


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank of a group."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_counts_its_collectives() -> None:
    group = dist.group.WORLD
    before = _torch.collectives_sent(group)
    dist.all_reduce(torch.zeros(1))
    dist.broadcast(torch.zeros(1), 0)
    assert _torch.collectives_sent(group) == before + 2


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise MemoryError


def pass_of(model: Any, inner: nn.Sequential, *, fails: bool) -> None:
    """Run a forward and a backward pass, which may fail in its middle."""
    handle = inner[0].register_forward_hook(lambda module, given, out: Failing.apply(out) if fails else None)
    try:
        model(torch.ones(2, 4)).sum().backward()
    finally:
        handle.remove()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [_torch.local_part(p.grad).clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("alone")
def test_buckets_begin_anew_after_a_backward_pass_that_was_aborted() -> None:
    inner = blocks()
    wrapped = DistributedDataParallel(inner)
    pass_of(wrapped, inner, fails=False)
    expected = gradients(inner)
    inner.zero_grad()
    with pytest.raises(MemoryError):
        pass_of(wrapped, inner, fails=True)
    inner.zero_grad()
    _torch.restart_buckets(wrapped)
    _torch.rebuild_buckets(wrapped)
    pass_of(wrapped, inner, fails=False)
    assert all(torch.equal(one, other) for one, other in zip(gradients(inner), expected, strict=True))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("alone")
def test_new_buckets_take_no_more_memory_than_the_old_ones(views: bool) -> None:
    """They are made in the second step; a meter that was not there before sees no frees of the old ones.

    Gloo's thread may free a bucket that it sent later than this one reads it: the smallest of five peaks has none such.
    """

    def peak_bytes(steps: int, metered_from: int = 0) -> int:
        return min(measured_peak_bytes(steps, metered_from) for _ in range(5))

    def measured_peak_bytes(steps: int, metered_from: int) -> int:
        with contextlib.ExitStack() as stack:
            meter = stack.enter_context(allocated()) if metered_from == 0 else None
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
            for step in range(steps):
                if step == metered_from > 0:
                    meter = stack.enter_context(allocated())
                wrapped(torch.ones(2, 64)).sum().backward()
                model.zero_grad()
        assert meter is not None
        return meter.peak_bytes

    peak_bytes(2)
    weights = 4 * 64 * 64 * 4
    assert peak_bytes(3) < peak_bytes(1) + weights // 2
    assert peak_bytes(2, metered_from=1) > peak_bytes(3, metered_from=2) + weights // 2


@pytest.mark.usefixtures("alone")
def test_a_hook_sends_the_buffers() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    wrapped, seen = DistributedDataParallel(inner), []
    _torch.send_buffers_by(wrapped, seen.append)
    wrapped(torch.ones(2, 4))
    assert [len(buffers) for buffers in seen] == [3]


@RESETS
@pytest.mark.usefixtures("alone")
def test_gradients_that_were_not_reduced_are_dropped() -> None:
    """With one rank nothing is sent, and the units go through the same states.

    `SHARDED_LEAVES_ACCUMULATE` says where gradients are meanwhile.
    """
    inner = blocks()
    mesh = init_device_mesh("cpu", (1,))
    for block in inner:
        fully_shard(block, mesh=mesh)
    root: Any = fully_shard(inner, mesh=mesh)
    _torch.initialize_units(root)
    root.reset_iter_state()  # before any pass
    pass_of(root, inner, fails=False)
    expected = gradients(root)
    root.zero_grad()
    root.set_requires_gradient_sync(False)
    pass_of(root, inner, fails=False)  # held, not reduced
    root.set_requires_gradient_sync(True)
    root.reset_iter_state()
    _torch.drop_unsharded_gradients(root)
    pass_of(root, inner, fails=False)
    assert all(torch.equal(one, other) for one, other in zip(gradients(root), expected, strict=True))


def test_a_rank_of_a_shared_tensor_has_its_part() -> None:
    whole = torch.ones(3)
    assert _torch.local_part(whole) is whole
    assert not _torch.is_shared(torch.Tensor)


def test_is_shared_local_part_chunk_of_and_is_first_copy_see_through_a_dtensor() -> None:
    """A part has the place that DTensor tells checkpoints; a copy is the first where no replica comes before."""
    own = torch.ones(2, 3)
    with _torch.fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False)
        assert tensor.shape == (4, 3)
        assert _torch.is_shared(type(tensor)) and not _torch.is_shared(torch.Tensor)
        assert torch.equal(_torch.local_part(tensor), own) and _torch.local_part(own) is own
        assert _torch.chunk_of(tensor) == ([0, 0], [2, 3])
        assert _torch.is_first_copy(tensor)


def test_fake_ranks_draw_nothing_and_are_gone_afterwards() -> None:
    """PyTorch numbers collectives under fake tensors by `generate_unique_id`, which draws from Python's generator."""
    before, number = random.getstate(), _meta_registrations.generate_unique_id
    with _torch.fake_ranks(3):
        assert dist.get_world_size() == 3 and dist.get_rank() == 0
        assert _meta_registrations.generate_unique_id is not number
    assert not dist.is_initialized() and _meta_registrations.generate_unique_id is number
    assert random.getstate() == before


def test_ranks_of_reads_groups_and_their_names() -> None:
    with _torch.fake_ranks(3):
        group = dist.group.WORLD
        assert group is not None
        assert _torch.ranks_of((torch.ones(1), group.boxed())) == 3
        assert _torch.ranks_of((torch.ones(1), "sum", group.group_name)) == 3
        assert _torch.ranks_of((torch.ones(1),)) == 3

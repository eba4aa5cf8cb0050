"""PyTorch's engines put on a workload: DistributedDataParallel, and `fully_shard` (FSDP2).

Both wrap a module that runs the whole of `loss_fn(model, batch)`, so that their hooks see every pass, whatever parts of
the model the loss function calls, and the model itself stays the object that it was. Where steps may have to be undone,
they tell an agreement before a collective of theirs is sent, and how a rank that failed answers it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from memfit._torch.distributed import (
    drop_unsharded_gradients,
    initialize_units,
    rebuild_buckets,
    restart_buckets,
    send_buffers_by,
)
from memfit._torch.tensors import tree_map
from memfit.errors import PlanError, UsageError
from memfit.ir.sharding import Sharding
from memfit.ranks.agreement import Agreement, Answer, PeerError, PendingCollective
from memfit.ranks.group import SharedStep
from memfit.ranks.in_place import Gather, ReduceScatter, is_gloo, send_in_place
from memfit.ranks.meta_models import Initialisation, allocate, is_on_meta
from memfit.workload import Loss, Workload, class_name

_MIB = 2**20


@dataclasses.dataclass(eq=False)
class _Outside:
    """Work to be run in place of a step's forward pass, within what an engine puts around it."""

    work: Callable[[], Any]
    result: Any = None


class _ForwardPass(nn.Module):
    """The forward pass of a step: `loss_fn(model, batch)`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Loss]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Loss | None:
        if isinstance(batch, _Outside):
            batch.result = batch.work()
            return None
        return self.loss_fn(self.model, batch)


def shared(
    workload: Workload, sharding: Sharding, mesh: DeviceMesh, *, is_part: bool = False
) -> tuple[Workload, SharedStep]:
    """Return a workload whose step ranks share, and what its step asks of them; call it on each rank.

    Parameters of a fully sharded model are shards from then on, in the optimizer too, and stay so. Where `is_part`,
    weights are not made equal to those of the first rank.

    Raises:
        PlanError: A unit is no module of the model, or there is no engine of this mode.
    """
    if sharding.mode == "ddp":
        return _data_parallel(workload, sharding, mesh, is_part)
    if not sharding.is_fully_sharded:
        raise PlanError(
            f"levers.sharding.mode={sharding.mode!r} can be predicted only: use 'ddp', or 'zero2' with reduces='last'"
            " for less memory"
        )
    return _fully_sharded(workload, sharding, mesh, is_part)


def why_not_undone(sharding: Sharding) -> str:
    """Return why ranks can't undo a step that they share, and what to do about it; "" where they can."""
    if not sharding.is_fully_sharded:
        return ""
    if not hasattr(FSDPModule, "reset_iter_state"):
        return (
            f"levers.sharding.mode={sharding.mode!r} needs torch 2.13 (FSDPModule.reset_iter_state), and this is"
            f" {torch.__version__}: install it, use levers.sharding.mode='ddp'"
        )
    if sharding.shards == 1:
        return (
            "as many levers.sharding.replicas as ranks: use levers.sharding.mode='ddp', for whole copies with less"
            " memory"
        )
    return ""


def _data_parallel(
    workload: Workload, sharding: Sharding, mesh: DeviceMesh, is_part: bool
) -> tuple[Workload, SharedStep]:
    if not is_part:
        _equalize(workload.model)
    wrapped = DistributedDataParallel(
        _ForwardPass(workload.model, workload.loss_fn),
        process_group=mesh.get_group(),
        gradient_as_bucket_view=sharding.gradient_as_bucket_view,
        bucket_cap_mb=sharding.bucket_cap_bytes / _MIB,
        init_sync=False,  # its copies of the weights outlive this call, by chance, in gloo's threads
    )
    engine = _DataParallel(wrapped, sharding)
    ranks = SharedStep(mesh, engine, is_part=is_part)
    if is_part:
        wrapped.register_comm_hook(ranks, _reduce)  # C++ reads a result that fake ranks don't give
        wrapped.logger = _Silent()  # which times kernels of a GPU that is not there
    return _with_loss(workload, engine), ranks


class _DataParallel:
    """DistributedDataParallel on a model."""

    def __init__(self, wrapped: DistributedDataParallel, sharding: Sharding) -> None:
        self._wrapped, self._sharding = wrapped, sharding
        self._agreement: Agreement | None = None

    def __call__(self, batch: Any) -> Loss:
        if self._agreement is not None:
            with self._agreement.opening():
                rebuild_buckets(self._wrapped)
        result: Loss = self._wrapped(batch)
        return result

    def syncing(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        if is_last or self._sharding.reduces == "each":
            return contextlib.nullcontext()
        return self._wrapped.no_sync()

    def held_bytes(self, workload: Workload) -> int:
        """Return the bytes of the buckets: as large as the gradients."""
        return sum(p.numel() * p.itemsize for p in workload.model.parameters() if p.requires_grad)

    def outside(self, work: Callable[[], Any]) -> Any:
        """Run work outside of steps: weights are whole."""
        return work()

    def drop_forward(self) -> None:
        """Do nothing: weights are whole."""

    def watch(self, agreement: Agreement) -> None:
        """Tell an agreement of the model's buckets and buffers, which are sent as the engine sends them by itself."""
        sending = self._wrapped.process_group
        source = dist.get_global_rank(sending, 0)

        def reduced(group, bucket):  # type: ignore[no-untyped-def]  # the engine compares annotations with classes
            buffer = bucket.buffer()
            made: dict[str, Any] = {"dtype": buffer.dtype, "device": buffer.device, "layout": buffer.layout}
            answer = functools.partial(_all_reduce_zeros, group, buffer.shape, made, dist.ReduceOp.SUM)
            key = ("bucket", buffer.shape, buffer.dtype, buffer.layout)
            try:
                agreement.before(PendingCollective(key, ((group, answer),)))
            except PeerError:  # not to be thrown through the engine: the next sum throws it again
                return _done(buffer)
            buffer.mul_(1.0 / group.size())
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        def equalized(buffers: list[torch.Tensor]) -> None:
            for kind in dict.fromkeys(buffer.dtype for buffer in buffers):
                _send_buffers([b for b in buffers if b.dtype == kind], source, sending, agreement)

        self._wrapped.register_comm_hook(sending, reduced)
        send_buffers_by(self._wrapped, equalized)
        self._agreement = agreement

    def reset(self) -> None:
        restart_buckets(self._wrapped)


class _Silent:
    """Takes what DistributedDataParallel notes of itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _reduce(ranks: SharedStep, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    ranks.reduce(bucket.buffer())
    return _done(bucket.buffer())


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


_reduce.__annotations__.clear()  # DistributedDataParallel compares them, which are texts here, with classes


def _fully_sharded(
    workload: Workload, sharding: Sharding, mesh: DeviceMesh, is_part: bool
) -> tuple[Workload, SharedStep]:
    model = workload.model
    initialisation = Initialisation(model) if is_on_meta(model) else None
    if initialisation is not None:
        _draw_as_first(mesh)
    elif not is_part:
        _equalize(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(sharding.param_dtype), reduce_dtype=_dtype(sharding.reduce_dtype), cast_forward_inputs=False
    )
    given: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if sharding.offload
        else OffloadPolicy(),
    }
    for fqn in sharding.units or ():
        unit, stays = _unit(model, fqn), sharding.mode == "zero2" or fqn in sharding.kept
        name = class_name(unit)
        fully_shard(unit, reshard_after_forward=not stays, **given)
        setattr(type(unit), "memfit_stands_for", name)  # noqa: B010  (PyTorch made this class for the unit's)
    dtype = _dtype(sharding.param_dtype)
    if dtype is not None:  # the loss function's other inputs, such as targets, stay as they are
        model.register_forward_pre_hook(functools.partial(_cast, dtype), with_kwargs=True)
    root: Any = fully_shard(_ForwardPass(model, workload.loss_fn), **given)
    if is_gloo(mesh.get_group(mesh.ndim - 1)):
        send_in_place(root)
    if initialisation is not None:
        allocate(root, torch.device("cpu" if sharding.offload else mesh.device_type))
        initialisation.run()
    _rebind(workload.optimizer, before, dict(model.named_parameters(remove_duplicate=False)))
    del before
    gc.collect()  # whole parameters are in cycles of objects
    engine = _FullySharded(root, sharding, mesh)
    return _with_loss(workload, root), SharedStep(mesh, engine, shards=sharding.shards, is_part=is_part)


class _FullySharded:
    """`fully_shard` on a model."""

    def __init__(self, root: FSDPModule, sharding: Sharding, mesh: DeviceMesh) -> None:
        self._root, self._sharding, self._mesh = root, sharding, mesh

    @contextlib.contextmanager
    def syncing(self, is_last: bool) -> Iterator[None]:
        if self._sharding.reduces == "last":
            self._root.set_requires_gradient_sync(is_last)
        yield

    def watch(self, agreement: Agreement) -> None:
        """Tell an agreement of the gathers and reductions of the model's units; replicas average what shards added up.

        Raises:
            UsageError: This PyTorch can't end a step in the middle, or nothing is cut.
        """
        if reason := why_not_undone(self._sharding):
            raise UsageError(f"recover=True with {reason}, or give recover=False")
        initialize_units(self._root)
        replicas = self._mesh.get_group("replicas") if self._sharding.replicas > 1 else None
        units = [module for module in self._root.modules() if isinstance(module, FSDPModule)]  # type: ignore[attr-defined]
        for number, unit in enumerate(units):
            gather: Any = _ToldGather(agreement, number, unit)
            reduce: Any = _ToldReduceScatter(agreement, number, replicas)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)

    def reset(self) -> None:
        self._root.reset_iter_state()
        drop_unsharded_gradients(self._root)

    def held_bytes(self, workload: Workload) -> int:
        """Return 0: what is sent is made when it is."""
        return 0

    def outside(self, work: Callable[[], Any]) -> Any:
        """Run work that runs the model forward outside of steps, within what is put around a step's forward pass."""
        given = _Outside(work)
        root: Any = self._root
        root(given)
        self.drop_forward()
        return given.result

    def drop_forward(self) -> None:
        root: Any = self._root
        if hasattr(root, "reset_iter_state"):  # new in torch 2.13
            root.reset_iter_state()  # or the next backward pass would look for the order of these passes
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _unit(model: nn.Module, fqn: str) -> nn.Module:
    try:
        return model.get_submodule(fqn)
    except AttributeError as e:
        raise PlanError(f"levers.sharding.units names {fqn!r}, and the model has no such module") from e


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _with_loss(workload: Workload, wrapped: Any) -> Workload:
    def loss_fn(model: nn.Module, batch: Any) -> Loss:
        result: Loss = wrapped(batch)
        return result

    return dataclasses.replace(workload, loss_fn=loss_fn)


def _equalize(model: nn.Module) -> None:
    """Make weights and buffers those of the first rank, each in place."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)


def _draw_as_first(mesh: DeviceMesh) -> None:
    """Draw random numbers as the first rank does, from here on."""
    state = torch.get_rng_state().to(mesh.device_type)
    dist.broadcast(state, 0)
    torch.set_rng_state(state.cpu())


def _cast(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a model's inputs with what is floating-point in another dtype."""
    return tree_map(
        lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
    )


def _rebind(optimizer: torch.optim.Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Have an optimizer update shards in place of the parameters that they are of; its state is cut in the same way."""
    shard_of = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [shard_of.get(id(p), p) for p in group["params"]]
    for parameter in list(optimizer.state):
        shard = shard_of.get(id(parameter))
        if isinstance(shard, DTensor):
            values = optimizer.state.pop(parameter)
            optimizer.state[shard] = {key: _cut(value, parameter, shard) for key, value in values.items()}


def _cut(value: Any, parameter: torch.Tensor, shard: DTensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, shard.device_mesh, shard.placements)


@torch.no_grad()
def _send_buffers(buffers: list[torch.Tensor], source: int, group: dist.ProcessGroup, agreement: Agreement) -> None:
    """Make buffers of one dtype those of the source, in one message."""
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    zeros = functools.partial(torch.zeros, flat.shape, dtype=flat.dtype, device=flat.device)
    key = ("buffers", flat.shape, flat.dtype)
    agreement.before(PendingCollective(key, ((group, lambda: dist.broadcast(zeros(), source, group=group)),)))
    dist.broadcast(flat, source, group=group)
    if dist.get_rank() != source:
        for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))


class _ToldGather(Gather):
    """A gather that tells an agreement first."""

    def __init__(self, agreement: Agreement, number: int, unit: FSDPModule) -> None:
        self._agreement, self._number, self._unit = agreement, number, unit

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._agreement.before(PendingCollective(("gather", self._number), ((group, self._answer),)))
        return super().__call__(output_tensor, input_tensor, group, async_op)

    def _answer(self) -> None:
        """Send the shards as they are: what the others compute of them stays within the range of their own values."""
        self._unit.unshard()
        self._unit.reshard()


class _ToldReduceScatter(ReduceScatter):
    """A reduction that tells an agreement first."""

    def __init__(self, agreement: Agreement, number: int, replicas: dist.ProcessGroup | None) -> None:
        self._agreement, self._number, self._replicas = agreement, number, replicas

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        made: dict[str, Any] = {"dtype": input_tensor.dtype, "device": input_tensor.device}
        answers: list[tuple[dist.ProcessGroup, Answer]] = [
            (group, functools.partial(_reduce_scatter_zeros, group, input_tensor.shape, made, op))
        ]
        if self._replicas is not None:
            answer = functools.partial(_all_reduce_zeros, self._replicas, output_tensor.shape, made, op)
            answers.append((self._replicas, answer))
        key = ("reduce", self._number, input_tensor.shape, input_tensor.dtype)
        self._agreement.before(PendingCollective(key, tuple(answers)))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _all_reduce_zeros(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], op: Any) -> None:
    dist.all_reduce(torch.zeros(shape, **made), op=op, group=group)


def _reduce_scatter_zeros(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], op: Any) -> None:
    given = torch.zeros(shape, **made)
    ReduceScatter()(given.new_empty(given.numel() // group.size()), given, group, op)

"""PyTorch's engines put on a workload: DistributedDataParallel, and `fully_shard` (FSDP2).

Both wrap a module that runs the whole of `loss_fn(model, batch)`, so that their hooks see every pass, whatever parts of
the model the loss function calls, and the model itself stays the object that it was. Where steps may have to be undone,
they tell an agreement before a collective of theirs is sent, and how a rank that failed answers it.

By themselves gloo's gather and reduce-scatter copy all that they send, as no other backend does, and its threads hold
what was sent for a moment after it has arrived: a rank would take several units more than predicted, by chance.
`Gather` and `ReduceScatter` send the same in the engine's own buffers, and wait until the threads have let go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from memfit._torch import (
    disable_current_modes,
    drop_unsharded_gradients,
    initialize_units,
    rebuild_buckets,
    restart_buckets,
    send_buffers_by,
    storage_key_of,
    storage_use_count,
    tree_map,
)
from memfit.errors import PlanError, UsageError
from memfit.ir import Sharding
from memfit.ranks.agreement import PeerError, SharedStep
from memfit.ranks.group import T
from memfit.ranks.meta_models import Initialisation, allocate, is_on_meta
from memfit.workload import Loss, Workload, class_name

_MIB = 2**20
_LONGEST_SECONDS = 1.0
"""For which gloo's threads are waited for: they only have to be given a processor."""


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
    if sharding.mode != "ddp" and not sharding.is_fully_sharded:
        raise PlanError(
            f"levers.sharding.mode={sharding.mode!r} can be predicted only: use 'ddp', or 'zero2' with reduces='last'"
            " for less memory"
        )
    engine = (_DataParallel if sharding.mode == "ddp" else _FullySharded)(workload, sharding, mesh, is_part)

    def loss_fn(model: nn.Module, batch: Any) -> Loss:
        return engine.loss(batch)

    return dataclasses.replace(workload, loss_fn=loss_fn), engine


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


class _DataParallel(SharedStep):
    """A step under DistributedDataParallel: weights are whole."""

    def __init__(self, workload: Workload, sharding: Sharding, mesh: DeviceMesh, is_part: bool) -> None:
        super().__init__(mesh, is_part=is_part)
        if not is_part:
            _equalize(workload.model)
        self._sharding = sharding
        self._wrapped = DistributedDataParallel(
            _ForwardPass(workload.model, workload.loss_fn),
            process_group=mesh.get_group(),
            gradient_as_bucket_view=sharding.gradient_as_bucket_view,
            bucket_cap_mb=sharding.bucket_cap_bytes / _MIB,
            init_sync=False,  # its copies of the weights outlive this call, by chance, in gloo's threads
        )
        if is_part:

            def reduce(ranks, bucket):  # type: ignore[no-untyped-def]  # the engine compares annotations with classes
                ranks.reduce(bucket.buffer())
                return _done(bucket.buffer())

            self._wrapped.register_comm_hook(self, reduce)  # C++ reads a result that fake ranks don't give
            self._wrapped.logger = _Silent()  # which times kernels of a GPU that is not there

    def loss(self, batch: Any) -> Loss:
        if self._side is not None:
            with self.opening():
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

    def tell(self) -> None:
        """Tell of the model's buckets and buffers, which are sent as the engine sends them by itself."""
        sending = self._wrapped.process_group
        source = dist.get_global_rank(sending, 0)

        def reduced(group, bucket):  # type: ignore[no-untyped-def]  # the engine compares annotations with classes
            buffer = bucket.buffer()
            made: dict[str, Any] = {"dtype": buffer.dtype, "device": buffer.device, "layout": buffer.layout}
            answer = functools.partial(_all_reduce_zeros, group, buffer.shape, made, dist.ReduceOp.SUM)
            try:
                self.before(("bucket", buffer.shape, buffer.dtype, buffer.layout), (group, answer))
            except PeerError:  # not to be thrown through the engine: the next sum throws it again
                return _done(buffer)
            buffer.mul_(1.0 / group.size())
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        @torch.no_grad()
        def equalized(buffers: list[torch.Tensor]) -> None:
            """Make buffers those of the source, in one message for each dtype."""
            for kind in dict.fromkeys(buffer.dtype for buffer in buffers):
                own = [buffer for buffer in buffers if buffer.dtype == kind]
                flat = torch.cat([buffer.reshape(-1) for buffer in own])
                zeros = functools.partial(torch.zeros, flat.shape, dtype=flat.dtype, device=flat.device)
                answer = functools.partial(lambda zeros: dist.broadcast(zeros(), source, group=sending), zeros)
                self.before(("buffers", flat.shape, flat.dtype), (sending, answer))
                dist.broadcast(flat, source, group=sending)
                if dist.get_rank() != source:
                    for buffer, value in zip(own, flat.split([buffer.numel() for buffer in own]), strict=True):
                        buffer.copy_(value.view_as(buffer))

        self._wrapped.register_comm_hook(sending, reduced)
        send_buffers_by(self._wrapped, equalized)

    def restart(self) -> None:
        restart_buckets(self._wrapped)


class _Silent:
    """Takes what DistributedDataParallel notes of itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class _FullySharded(SharedStep):
    """A step under `fully_shard`."""

    def __init__(self, workload: Workload, sharding: Sharding, mesh: DeviceMesh, is_part: bool) -> None:
        super().__init__(mesh, shards=sharding.shards, is_part=is_part)
        self._sharding = sharding
        model = workload.model
        initialisation = Initialisation(model) if is_on_meta(model) else None
        if initialisation is not None:  # random numbers are drawn as the first rank draws them, from here on
            state = torch.get_rng_state().to(mesh.device_type)
            dist.broadcast(state, 0)
            torch.set_rng_state(state.cpu())
        elif not is_part:
            _equalize(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        dtype, reduce_dtype = (
            None if name is None else getattr(torch, name) for name in (sharding.param_dtype, sharding.reduce_dtype)
        )
        pins = torch.accelerator.is_available()
        given: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=pins) if sharding.offload else OffloadPolicy(),
        }
        for fqn in sharding.units or ():
            try:
                unit = model.get_submodule(fqn)
            except AttributeError as e:
                raise PlanError(f"levers.sharding.units names {fqn!r}, and the model has no such module") from e
            name = class_name(unit)
            stays = sharding.mode == "zero2" or fqn in sharding.kept
            fully_shard(unit, reshard_after_forward=not stays, **given)
            setattr(type(unit), "memfit_stands_for", name)  # noqa: B010  (PyTorch made this class for the unit's)
        if dtype is not None:  # the loss function's other inputs, such as targets, stay as they are

            def cast(x: Any) -> Any:
                return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

            def cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
                return tree_map(cast, (args, kwargs))

            model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        root: Any = fully_shard(_ForwardPass(model, workload.loss_fn), **given)
        self._root = root
        if is_gloo(mesh.get_group(mesh.ndim - 1)):
            send_in_place(root)
        if initialisation is not None:
            allocate(root, torch.device("cpu" if sharding.offload else mesh.device_type))
            initialisation.run()
        _rebind(workload.optimizer, before, dict(model.named_parameters(remove_duplicate=False)))
        del before
        gc.collect()  # whole parameters are in cycles of objects

    def loss(self, batch: Any) -> Loss:
        result: Loss = self._root(batch)
        return result

    @contextlib.contextmanager
    def syncing(self, is_last: bool) -> Iterator[None]:
        if self._sharding.reduces == "last":
            self._root.set_requires_gradient_sync(is_last)
        yield

    def tell(self) -> None:
        """Tell of the gathers and reductions of the model's units; replicas average what shards added up.

        Raises:
            UsageError: This PyTorch can't end a step in the middle, or nothing is cut.
        """
        if reason := why_not_undone(self._sharding):
            raise UsageError(f"recover=True with {reason}, or give recover=False")
        initialize_units(self._root)
        replicas = self.mesh.get_group("replicas") if self._sharding.replicas > 1 else None
        for number, unit in enumerate(_units_of(self._root)):
            self._tell_of(number, unit, replicas)

    def _tell_of(self, number: int, unit: Any, replicas: dist.ProcessGroup | None) -> None:
        def shards() -> None:
            """Send the shards: what the others compute of them stays within the range of their own values."""
            unit.unshard()
            unit.reshard()

        def gathering(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
            self.before(("gather", number), (group, shards))

        def reducing(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
            made: dict[str, Any] = {"dtype": given.dtype, "device": given.device}
            shape = given.shape  # the answer holds no tensor

            def zeros() -> None:
                sent = torch.zeros(shape, **made)
                ReduceScatter()(sent.new_empty(sent.numel() // group.size()), sent, group, op)

            answers: list[tuple[dist.ProcessGroup, Callable[[], None]]] = [(group, zeros)]
            if replicas is not None:
                answers.append((replicas, functools.partial(_all_reduce_zeros, replicas, output.shape, made, op)))
            self.before(("reduce", number, given.shape, given.dtype), *answers)

        unit.set_custom_all_gather(Gather(gathering))
        unit.set_custom_reduce_scatter(ReduceScatter(reducing))

    def restart(self) -> None:
        self._root.reset_iter_state()
        drop_unsharded_gradients(self._root)

    def outside(self, work: Callable[[], T]) -> T:
        """Run work that runs the model forward outside of steps, within what is put around a step's forward pass."""
        given = _Outside(work)
        self._root(given)
        self.drop_forward()
        result: T = given.result
        return result

    def drop_forward(self) -> None:
        if hasattr(self._root, "reset_iter_state"):  # new in torch 2.13
            self._root.reset_iter_state()  # or the next backward pass would look for the order of these passes
        for unit in _units_of(self._root):
            unit.reshard()


def _equalize(model: nn.Module) -> None:
    """Make weights and buffers those of the first rank, each in place."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)


def _rebind(optimizer: torch.optim.Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Have an optimizer update shards in place of the parameters that they are of; its state is cut in the same way."""
    shard_of = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [shard_of.get(id(p), p) for p in group["params"]]
    for parameter in list(optimizer.state):
        shard = shard_of.get(id(parameter))
        if isinstance(shard, DTensor):
            values = optimizer.state.pop(parameter)
            optimizer.state[shard] = {
                key: distribute_tensor(value, shard.device_mesh, shard.placements)
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                else value
                for key, value in values.items()
            }


# Names of torch 2.13; those before are deprecated by it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _InPlace:
    """A collective of `fully_shard`, in place over gloo and as the backend does it elsewhere.

    Args:
        before: Called with the output, the input, the group and, of a reduction, how it is done.
    """

    def __init__(self, before: Callable[..., None] | None = None) -> None:
        self._before = before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as the engine does by itself."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_InPlace):
    """A gather of shards."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._before is not None:
            self._before(output_tensor, input_tensor, group)
        if not is_gloo(group):
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        held = _holders(output_tensor), _holders(input_tensor)
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with disable_current_modes():  # nothing is allocated: a rank sends all of it, or fails before
            for rank, part in enumerate(parts):
                dist.broadcast(part, group_src=rank, group=group)
        del own, parts, part
        _wait_for_release((output_tensor, held[0]), (input_tensor, held[1]))
        return None


class ReduceScatter(_InPlace):
    """A reduction of which each rank keeps its part."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._before is not None:
            self._before(output_tensor, input_tensor, group, op)
        if not is_gloo(group):
            work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work
        held = _holders(input_tensor)
        # A view: gloo's threads then hold a tensor of their own, which shows in the count of the storage.
        dist.all_reduce(input_tensor.view(-1), op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        _wait_for_release((input_tensor, held))
        return None


def _units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def send_in_place(model: nn.Module) -> None:
    """Have all units of a fully sharded model gather and reduce in place, where they do so over gloo."""
    for unit in _units_of(model):
        unit.set_custom_all_gather(Gather())
        unit.set_custom_reduce_scatter(ReduceScatter())


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Tell whether a process group sends over gloo."""
    return bool(dist.get_backend(group) == "gloo")


def _holders(tensor: torch.Tensor) -> int:
    return storage_use_count(storage_key_of(tensor))


def _wait_for_release(*tensors: tuple[torch.Tensor, int]) -> None:
    """Wait until storages are held as often as before; no longer than that takes by any chance."""
    until = time.monotonic() + _LONGEST_SECONDS
    while any(_holders(tensor) > before for tensor, before in tensors) and time.monotonic() < until:
        time.sleep(0)


def _all_reduce_zeros(group: dist.ProcessGroup, shape: torch.Size, made: dict[str, Any], op: Any) -> None:
    dist.all_reduce(torch.zeros(shape, **made), op=op, group=group)

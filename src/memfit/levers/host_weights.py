"""Weights in host memory: frozen ones wait there, and come to the device a block at a time, in both passes.

A block's weights are copied to the device before its forward pass, the next block's beside its computation, and let go
of after it; they come again for its backward pass, in which the block before is next. Where a region's recomputation
runs a block, it finds them there, or has them copied once more. So the device holds two blocks' weights at a time, not
all of them. The computation is the same on the same values.

As `fully_shard` gathers shards, and as parameters are offloaded in J. Ren et al. 2021, *ZeRO-Offload: Democratizing
Billion-Scale Model Training*, and S. Rajbhandari et al. 2021, *ZeRO-Infinity*, section 5.1; here only weights that do
not train, whose copies in the host never change. Trained ones stay on the device: their gradients are there.

The parameters of the model are those in the host: state dicts, copies and optimizers see their values. While a block
runs, its modules have other parameters in their place, whose memory is on the device. Autograd's saved tensors share
that memory: it is emptied and filled again, as `fully_shard` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from memfit import ranks, workload
from memfit._torch import (
    FakeTensor,
    after_backward,
    current_graph_task_id,
    own_buffers,
    own_parameters,
    set_memory,
    storage_key_of,
    tree_leaves,
)
from memfit.capture import is_compiled
from memfit.errors import PlanError, PlanMismatchError
from memfit.foundations import format_bytes
from memfit.ir import LEAST_BYTES, HostWeights, Levers, enclosing
from memfit.levers.checkpointing import COMPILATION
from memfit.levers.lever import Circumstance, Conflict, Lever, LeversOn, NotOffered, Setting, has_link, least_bytes
from memfit.levers.shared_by_ranks import SHARDING
from memfit.recomputation import is_worth_moving, link_to
from memfit.workload import Workload

HOST_WEIGHTS = "weights in host memory"
_OFF = "set levers.host_weights to null"
_BLOCK = "_memfit_block"  # the attribute of a module that has its `_Block`


class HostWeightsLever(Lever):
    """Weights that don't train in pinned host memory, on the device while their block runs."""

    name = HOST_WEIGHTS
    field = "host_weights"
    conflicts = (
        Conflict(
            HOST_WEIGHTS,
            Circumstance.NO_LINK,
            "the speed of copies to the host is unknown, or host and device share their memory",
            f"name a GPU with a known link_bytes_per_second, or {_OFF}",
        ),
        Conflict(
            HOST_WEIGHTS,
            "bf16-true",
            "that precision swaps every weight",
            f"use 'bf16-mixed', build the model in bf16, or {_OFF}",
        ),
        Conflict(
            HOST_WEIGHTS,
            SHARDING,
            "`fully_shard` moves the weights itself",
            f"set levers.sharding.offload, plan for one process, or {_OFF}",
        ),
        Conflict(HOST_WEIGHTS, COMPILATION, "compiled code does not run its modules one by one", _OFF),
        Conflict(HOST_WEIGHTS, Circumstance.COMPILED, "compiled code does not run its modules one by one", _OFF),
        Conflict(
            HOST_WEIGHTS,
            Circumstance.ADAPTING,
            "predictions for other shapes need the original model, and its weights are on two devices by then",
            f"use memfit.apply with one plan for all shapes, or {_OFF}",
        ),
        Conflict(HOST_WEIGHTS, Circumstance.JITTOR, "this lever needs PyTorch", _OFF),
    )

    def words(self, on: LeversOn) -> tuple[str, str]:
        held = on.levers.host_weights
        assert held is not None
        plural = "s" * (len(held.modules) != 1)
        return (
            f"frozen weights of {len(held.modules):,} module{plural}, {format_bytes(held.host_bytes)} of host memory",
            "weights in host",
        )

    @contextlib.contextmanager
    def on_model(self, levers: Levers, model: nn.Module) -> Iterator[None]:
        """Have the frozen weights of some modules wait in host memory, until the context is left.

        Raises:
            PlanMismatchError: The model has no module of a name.
            PlanError: A module's weights wait there already, or it has none that can.
        """
        assert levers.host_weights is not None
        modules, names = dict(model.named_modules()), levers.host_weights.modules
        for fqn in names:
            if fqn not in modules:
                raise PlanMismatchError(
                    f"the plan's host_weights.modules has {fqn!r}, and the model has no such module: the plan is for"
                    " another model"
                )
            others = {other for other in names if other != fqn} | set(levers.tiles.modules if levers.tiles else ())
            if not enclosing(fqn).isdisjoint(others) or any(_BLOCK in vars(m) for m in modules[fqn].modules()):
                raise PlanError(
                    f"the weights of {fqn!r} of host_weights.modules wait in host memory already, or it lies within"
                    " another such module or one of tiles.modules: name each once, and call close() on an earlier step"
                )
        blocks = _Blocks()
        moved = _movable(model)
        for fqn in names:
            weights = [_Weight(key, *moved[key]) for key in moved if fqn in enclosing(key)]
            if not weights:
                raise PlanError(
                    f"{fqn!r} of host_weights.modules has no weight that can wait in host memory: of 64 KiB or more,"
                    " that does not train, and that no other module or name has. Take it out"
                )
            blocks.all.append(_Block(modules[fqn], weights, blocks, len(blocks.all)))
        try:
            for block in blocks.all:
                block.put_on()
            yield
        finally:
            blocks.leave_all()
            for block in reversed(blocks.all):
                block.take_off()
            for block in blocks.all:  # last, since the device may have no room
                for weight in block.weights:
                    weight.to_home()

    def stays_behind(self, levers: Levers, model: nn.Module) -> list[nn.Parameter]:
        assert levers.host_weights is not None
        return [
            tensor
            for fqn, (_, _, tensor) in _movable(model).items()
            if isinstance(tensor, nn.Parameter) and not enclosing(fqn).isdisjoint(levers.host_weights.modules)
        ]

    def is_applied(self, workload: Workload) -> bool:
        return any(_BLOCK in vars(module) for module in workload.model.modules())

    def host_bytes(self, levers: Levers, state_bytes: int, host_budget_bytes: int) -> int:
        return 0 if levers.host_weights is None else levers.host_weights.host_bytes

    def propose(self, step: Setting, wanted: list[Levers]) -> list[Levers]:
        plain = step.predicted(step.plain)
        if not step.host_budget_bytes or not has_link(step.device):
            raise NotOffered("it needs host_budget=, and a device with a link to the host")
        if step.budget_bytes is not None and plain.peak_upper_bytes <= step.budget_bytes:
            raise NotOffered("the step fits with its weights on the device")
        if step.shardings or step.plain.sharding is not None or is_compiled(step.workload):
            raise NotOffered("ranks share the weights, or a compiler has them")
        if step.is_long and not step.tries_all:  # each combination takes another capture
            raise NotOffered("weights of a long step are moved only where nothing else fits")
        found = list[Levers]()
        for levers in wanted:
            if not step.allows(levers) or levers.precision == "bf16-true" or levers.compiler != "none":
                continue
            held = _offered(step, levers)
            if held is not None:
                found.append(replace(levers, host_weights=held))
        if not step.tries_all and any(levers.chunked_loss for levers in found):  # whole losses are there to compare
            found = [levers for levers in found if levers.chunked_loss]
        if not found:
            raise NotOffered(f"repeated blocks have less than {format_bytes(least_bytes(step))} of frozen weights")
        return [*wanted, *found]


def _offered(step: Setting, levers: Levers) -> HostWeights | None:
    """Return the repeated blocks whose weights the host has room for, from the first; None where that is not worth it.

    PyTorch's allocator of pinned memory rounds each tensor up to a power of two.
    """
    trace = step.trace(levers)
    sizes, pinned = Counter[str](), Counter[str]()
    blocks = [
        block
        for block in ranks.repeated_blocks(trace)
        if levers.tiles is None or enclosing(block).isdisjoint(levers.tiles.modules)
    ]
    for storage in trace.storages:
        if storage.birth >= 0 or storage.owner < 0 or storage.nbytes < LEAST_BYTES:
            continue
        frozen = storage.parameter > 0 and not trace.parameters[storage.parameter].trainable
        made = storage.category == "buffers" and levers.frozen_weights is not None
        for block in enclosing(trace.modules[storage.owner].fqn).intersection(blocks) if frozen or made else ():
            sizes[block] += storage.nbytes
            pinned[block] += 1 << (storage.nbytes - 1).bit_length()
    names, taken_bytes = list[str](), 0
    for block in blocks:
        if sizes[block] and taken_bytes + pinned[block] <= step.host_budget_bytes:
            names.append(block)
            taken_bytes += pinned[block]
    on_device = 0 if step.tries_all else 2 * max(sizes.values(), default=0)
    if sum(sizes[block] for block in names) - on_device < max(1, least_bytes(step)):
        return None
    return HostWeights(modules=tuple(names), host_bytes=taken_bytes)


def _movable(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Return the tensors of a model that can wait in host memory, by FQN, each with its module and name there.

    They are parameters that don't train, but for the model's first, which code asks where the model is; and the codes
    that memfit made of others. No other module or name has them.
    """
    held = [
        (f"{fqn}.{name}", module, name, tensor)
        for fqn, module in model.named_modules()
        for own in (own_parameters(module), own_buffers(module))
        for name, tensor in own.items()
        if tensor is not None and tensor.layout is torch.strided
    ]
    uses = Counter(storage_key_of(tensor) for *_, tensor in held)
    first = next(model.parameters(), None)
    return {
        key: (module, name, tensor)
        for key, module, name, tensor in held
        if (isinstance(tensor, nn.Parameter) and not tensor.requires_grad or getattr(tensor, "memfit_made", False))
        and tensor is not first
        and type(tensor) in (nn.Parameter, Tensor, FakeTensor)
        and uses[storage_key_of(tensor)] == 1
        and is_worth_moving(tensor)
    }


class _Weight:
    """A tensor of a module that waits in host memory, and the one that stands in its place while its block runs."""

    def __init__(self, fqn: str, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.fqn, self.module, self.name, self.tensor = fqn, module, name, tensor
        self.home = tensor.device
        self.place: torch.device = getattr(tensor, "memfit_place", tensor.device)
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = own_parameters(self.module)
        return own if self.name in own else own_buffers(self.module)

    def _twin(self) -> tuple[Tensor, Tensor]:
        """Return the tensor on the device, and the same with a version of its own: autograd sees no change of it."""
        if self._made is None:
            empty = torch.empty_like(self.tensor, device=self.place, requires_grad=False)
            is_parameter = self.name in own_parameters(self.module)
            twin = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
            twin.untyped_storage().resize_(0)
            self._made = twin, twin.data
        return self._made

    def to_host(self) -> None:
        if self.place.type != "cpu":
            host = torch.empty_like(self.tensor, device="cpu", pin_memory=True, requires_grad=False)
            host.copy_(self.tensor.detach())
            set_memory(self.tensor, host)
        self._twin()

    def to_home(self) -> None:
        self._made = None
        if self.tensor.device != self.home:
            set_memory(self.tensor, self.tensor.detach().to(self.home))
        vars(self.tensor).pop("memfit_place", None)

    def fetch(self) -> Any:
        """Begin to copy it to the device; return the event of the copy's end."""
        if self.tensor.requires_grad:
            raise PlanError(
                f"{self.fqn} trains now, and waits in host memory: call close() on the step, and make another plan"
            )
        twin, values = self._twin()
        twin.untyped_storage().resize_(self.tensor.nbytes)
        link = link_to(self.place)
        return link.copy(workload.transfers.copy_in, link.back, values, self.tensor)

    def arrive(self, event: Any) -> None:
        """Have the computation wait for the copy, and the module compute with it."""
        twin, values = self._twin()
        link_to(self.place).wait(event, values)
        self._own[self.name] = twin

    def leave(self) -> None:
        self._own[self.name] = self.tensor
        self._twin()[0].untyped_storage().resize_(0)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": None}


class _Blocks:
    """The blocks of a model whose weights wait in host memory, in the order of its modules."""

    def __init__(self) -> None:
        self.all: list[_Block] = []
        self._running = 0  # backward passes of blocks
        self._next: _Block | None = None  # whose backward pass will begin
        self._ends = False  # whether something is to run at the end of this backward pass

    def begin(self, block: _Block) -> None:
        """Have a block's weights there for its backward pass."""
        if not self._ends:
            self._ends = True
            after_backward(self.leave_all)
        block.running += 1
        self._running += 1
        block.is_wanted = False
        block.arrive()
        before = self.all[block.place - 1] if block.place else None
        self._next = before if before is not None and before.awaited > 0 else None
        if self._running == 1:
            self._fetch_next()

    def end(self, block: _Block) -> None:
        """Let go of a block's weights after its backward pass: the one that has begun since has its own by then."""
        block.running -= 1
        self._running -= 1
        block.leave()
        self._fetch_next()

    def _fetch_next(self) -> None:
        if self._next is not None:
            self._next.is_wanted = True
            self._next.fetch()
            self._next = None

    def leave_all(self) -> None:
        """Have no block's weights on the device."""
        self._ends, self._running, self._next = False, 0, None
        for block in self.all:
            block.awaited = block.running = 0
            block.is_wanted = False
            block.leave()

    def check(self) -> None:
        """Forget a backward pass that an error ended, where none is running."""
        if self._ends and current_graph_task_id() == -1:
            self.leave_all()


class _Block:
    """The `forward` of a module whose weights wait in host memory. Copies with the module, bound to the copy.

    Attributes:
        awaited: Forward passes whose backward passes have not begun.
        running: Backward passes that have.
        is_wanted: Whether its weights were fetched for a backward pass that will begin.
    """

    def __init__(self, module: nn.Module, weights: list[_Weight], blocks: _Blocks, place: int) -> None:
        self.module, self.weights, self.blocks, self.place = module, weights, blocks, place
        self.awaited = self.running = 0
        self.is_wanted = False
        self._events: list[Any] | None = None  # of copies that have begun
        self._is_here = False

    def put_on(self) -> None:
        for weight in self.weights:
            weight.to_host()
        self.forward = self.module.__dict__.get("forward")
        vars(self.module).update({_BLOCK: self, "forward": self})

    def take_off(self) -> None:
        """Give the module its own `forward` back, if that was replaced."""
        if vars(self.module).pop(_BLOCK, None) is not None:
            del self.module.forward
            if self.forward is not None:
                self.module.forward = self.forward

    def fetch(self) -> None:
        if self._events is None:
            events: list[Any] = []
            try:
                events += (weight.fetch() for weight in self.weights)
            except BaseException:  # as where the device has no room for the second
                for weight, event in zip(self.weights, events, strict=False):
                    weight.arrive(event)
                for weight in self.weights:
                    weight.leave()
                raise
            self._events = events

    def arrive(self) -> None:
        self.fetch()
        if not self._is_here:
            assert self._events is not None
            for weight, event in zip(self.weights, self._events, strict=True):
                weight.arrive(event)
            self._is_here = True

    def leave(self) -> None:
        """Let go of the weights on the device, unless a backward pass needs them."""
        if self._events is None or self.running or self.is_wanted:
            return
        self.arrive()  # a copy that nobody waited for must not write to what is given away
        for weight in self.weights:
            weight.leave()
        self._events, self._is_here = None, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.blocks.check()
        recomputes = current_graph_task_id() != -1
        self.arrive()
        if not recomputes:
            for following in self.blocks.all[self.place + 1 : self.place + 2]:
                following.fetch()
        forward = self.forward or functools.partial(type(self.module).forward, self.module)
        given = _with_gradients((args, kwargs))
        try:
            out = forward(*args, **kwargs)
        except BaseException:
            self.leave() if recomputes else self.blocks.leave_all()  # a recomputation ends so
            raise
        self.leave()
        if torch.is_grad_enabled() and (made := _with_gradients(out)):
            self.awaited += not recomputes
            backward = _Backward(self, len(given), is_counted=not recomputes)
            for tensor in made:
                tensor.register_hook(backward.begin)
            for tensor in given:
                if not tensor.is_leaf:  # a leaf would keep its hook
                    tensor.register_hook(backward.has_gradient)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"awaited": 0, "running": 0, "is_wanted": False, "_events": None, "_is_here": False}


def _with_gradients(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]


@dataclass(eq=False)
class _Backward:
    """The backward pass of a block's call: from the gradient of its output to those of all its inputs."""

    block: _Block
    missing: int  # inputs whose gradients are not complete
    is_counted: bool
    is_running: bool = False

    def begin(self, grad: Tensor) -> None:
        if not self.is_running:
            self.is_running = True
            self.block.awaited -= self.is_counted
            self.block.blocks.begin(self.block)

    def has_gradient(self, grad: Tensor) -> None:
        self.missing -= 1
        if self.is_running and self.missing == 0:
            self.block.blocks.end(self.block)

"""Calls of lean modules, which run again in the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit._torch.modules import DropoutBase, NormBase, own_buffers, own_parameters
from memfit._torch.tensors import storage_key_of, version_of
from memfit.errors import RecomputationError
from memfit.held_state import attribute_generators
from memfit.recomputation import probe
from memfit.recomputation.containers import Placeholder, mapped
from memfit.recomputation.frame import autocast_state, graph_task, statistics_untouched
from memfit.recomputation.generators import Draws, Generators, foreign_generators, preserved

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Hooks of saved tensors: pack and unpack."""

_SMALL = 4  # a tensor that a call saves inside is kept where the output is this many times larger


class SavedTensor:
    """The object that autograd holds in place of a tensor.

    Attributes:
        tensor: The tensor, until it is kept or dropped; later, the recomputed one.
        task: The backward pass that it was recomputed for.
        call: The call that recomputes it; None where it is kept.
        place: Its place in that call's output (shape, strides, offset), or its number among the tensors saved inside.
        expected: The record of the tensor, where recomputations are probed or checked; otherwise None.
    """

    __slots__ = ("__weakref__", "call", "expected", "packed", "place", "task", "tensor", "unpack")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.task: int | None = None
        self.packed: Any = None
        self.unpack: Callable[[Any], torch.Tensor] = _not_unpacked
        self.call: Call | None = None
        self.place: Any = None
        self.expected: probe.Expected | None = None

    def keep(self, hooks: Hooks) -> None:
        """Keep the tensor, by hooks of saved tensors."""
        assert self.tensor is not None
        pack, self.unpack = hooks
        self.packed, self.tensor = pack(self.tensor), None

    def drop(self, call: Call, number: int | None = None) -> None:
        """Drop the tensor, to be recomputed by a call: as its output, or as the numbered tensor saved inside."""
        assert self.tensor is not None
        strides = self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        self.call, self.place = call, strides if number is None else number
        self.expected, self.tensor = probe.expected(self.tensor), None
        call.waiting.append(weakref.ref(self))

    def fill(self, task: int, output: torch.Tensor, inside: Mapping[int, torch.Tensor]) -> None:
        """Hold the recomputed tensor until the backward pass takes it, once."""
        if task != self.task:
            is_inside = isinstance(self.place, int)
            self.task, self.tensor = task, inside[self.place] if is_inside else output.as_strided(*self.place)

    def difference(self) -> str | None:
        """Return the recomputed tensor's difference, or None; a probe goes on with the original."""
        if self.expected is None or self.tensor is None:
            return None
        how = self.expected.difference(self.tensor)
        self.tensor = self.tensor if self.expected.original is None else self.expected.original
        return how

    def take(self) -> torch.Tensor:
        """Return the tensor."""
        if self.call is None:
            return self.unpack(self.packed)
        task = graph_task()
        if self.task != task or self.tensor is None:
            self.task = None
            self.call.run(task, self)
        recomputed, self.tensor = self.tensor, None
        assert recomputed is not None
        return recomputed


class Call:
    """One call of a lean module.

    Attributes:
        saves: The tensors that autograd saves in it, in order.
        waiting: The dropped tensors that it recomputes.
        version: The version of its output when it returned.
        dtype: The dtype of its output.
    """

    def __init__(self, fqn: str, module: nn.Module, given: Any, call_of: Callable[[torch.Tensor], Call | None]) -> None:
        self.fqn, self.module, self._trains = fqn, module, module.training
        self.saves: list[SavedTensor] = []
        self.waiting: list[weakref.ref[SavedTensor]] = []
        self._tensors: list[torch.Tensor] = []
        self._given = mapped(given, torch.Tensor, self._number)
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._arguments: list[Call | SavedTensor | None] = [call_of(tensor) for tensor in self._tensors]
        self._needs_gradient = [tensor.requires_grad for tensor in self._tensors]
        drops = isinstance(module, DropoutBase) and module.training
        is_foreign = not type(module).__module__.startswith("torch.")  # it may draw from anything
        self._generators = Generators.of(self._tensors) if drops or is_foreign else None
        self._draws = Draws(foreign_generators(attribute_generators(module))) if is_foreign else Draws(())
        self._is_sure_to_draw = drops
        self._autocast = autocast_state()

    def _number(self, tensor: torch.Tensor) -> Placeholder:
        self._tensors.append(tensor)
        return Placeholder(len(self._tensors) - 1)

    def finish(self, output: Any, hooks: Hooks) -> bool:
        """Keep or drop the tensors saved in the call; tell whether its output is dropped where it is saved."""
        self._draws.end()
        if self._generators is not None and not self._is_sure_to_draw and self._generators.are_as_before():
            self._generators = None
        dropped = self._droppable(output) if self._can_run_again(output) else None
        for number, saved in enumerate(self.saves):
            if saved.tensor is not None and dropped is not None and number in dropped:
                saved.drop(self, None if storage_of(saved.tensor) == storage_of(output) else number)
            elif saved.tensor is not None:
                saved.keep(hooks)
        if dropped is not None:
            self._arguments = [
                origin or kept_tensor(tensor, hooks)
                for origin, tensor in zip(self._arguments, self._tensors, strict=True)
            ]
            self.version, self.dtype = version_of(output), output.dtype
            self._made = _geometry(output), len(self.saves)
            self._address = StorageWeakRef(output.untyped_storage())  # no other storage gets this address meanwhile
        self.saves, self._tensors = [], []
        return dropped is not None

    def _can_run_again(self, output: Any) -> bool:
        """Tell whether the call made a new tensor, from arguments that are unchanged or can be recomputed."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not storage_of(output):
            return False
        for tensor, version, origin in zip(self._tensors, self._versions, self._arguments, strict=True):
            is_changed = version_of(tensor) != version
            if not storage_of(tensor) or (is_changed and origin is None):
                return False
            if storage_of(tensor) == storage_of(output) and not is_changed:
                return False
        return True

    def _droppable(self, output: torch.Tensor) -> set[int] | None:
        """Return the numbers of the saved tensors to drop; None where keeping the arguments costs more."""
        given = list(zip(self._tensors, self._versions, self._arguments, strict=True))
        arguments = {(storage_of(tensor), version) for tensor, version, _ in given}
        # Arguments are there anyway where they are lean outputs themselves, which chains a normalisation, a dropout and
        # an activation, or where the call's own backward pass saves them.
        there = {storage_of(tensor) for tensor, _, origin in given if origin is not None or tensor.is_leaf}
        held = (*own_parameters(self.module).values(), *own_buffers(self.module).values())
        own = {storage_of(tensor) for tensor in held if tensor is not None}
        large = _bytes(output) / _SMALL  # a dropout's mask, the steps of a composite activation; not statistics
        gains: dict[int, int] = {}
        dropped = set()
        for number, saved in enumerate(self.saves):
            if saved.tensor is None:
                continue
            key = storage_of(saved.tensor)
            if (key, version_of(saved.tensor)) in arguments:
                there.add(key)
            elif key and key not in own and _bytes(saved.tensor) >= large:
                dropped.add(number)
                gains[key] = _bytes(saved.tensor)
        cost = sum({storage_of(t): _bytes(t) for t in self._tensors if storage_of(t) not in there}.values())
        return dropped if cost == 0 or cost < sum(gains.values()) else None

    def run(self, task: int, asked: SavedTensor | None = None) -> torch.Tensor:
        """Recompute the call for a backward pass, fill the dropped tensors, and return the output.

        Raises:
            RecomputationError: The recomputation differs from the call.
        """
        output, inside, count = self._run_again(task)
        if (_geometry(output), count) != self._made:
            (made, n_saved), now = self._made, _geometry(output)
            how = f"it returned {now} and saved {count} tensors; the forward pass returned {made} and saved {n_saved}"
            raise RecomputationError((self.fqn,), self.fqn, how)
        for saved in self._waiting():
            if task >= 0 or saved is asked:  # outside of a backward pass, no other is taken
                saved.fill(task, output, inside)
                difference = saved.difference()
                if difference is not None:
                    probe.report(RecomputationError((self.fqn,), self.fqn, difference), output.device)
        return output

    def output(self, task: int) -> torch.Tensor:
        """Return the output, from a dropped tensor that is filled already or by recomputation."""
        for saved in self._waiting():
            if saved.task == task and saved.tensor is not None and not isinstance(saved.place, int):
                return saved.tensor.as_strided(*self._made[0][1:])
        return self.run(task)

    def _waiting(self) -> list[SavedTensor]:
        return [saved for saved in (reference() for reference in self.waiting) if saved is not None]

    def _run_again(self, task: int) -> tuple[torch.Tensor, dict[int, torch.Tensor], int]:
        """Run the call; return its output, the dropped tensors saved inside by number, and the count of saved ones."""
        places = {saved.place for saved in self._waiting()}
        inside: dict[int, torch.Tensor] = {}
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count in places:
                inside[count] = tensor.detach()
            count += 1

        args, kwargs = self._values(task)
        with saved_tensors_hooks(pack, _not_unpacked), torch.enable_grad(), self._restored_state():
            output = self.module(*args, **kwargs)
        return output.detach(), inside, count

    def _values(self, task: int) -> Any:
        values = [
            (origin.output(task) if isinstance(origin, Call) else origin.take()).detach().requires_grad_(needs)
            for origin, needs in zip(self._arguments, self._needs_gradient, strict=True)
            if origin is not None
        ]
        return mapped(self._given, Placeholder, lambda value: values[value.number])

    @contextlib.contextmanager
    def _restored_state(self) -> Iterator[None]:
        """Restore autocast, generators and training mode of the call, until the context is left."""
        with contextlib.ExitStack() as stack:
            for device, (enabled, dtype, cache) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            stack.callback(self.module.__dict__.update, training=self.module.training)
            self.module.training = self._trains
            if isinstance(self.module, NormBase):
                stack.enter_context(statistics_untouched([self.module]))
            if self._generators is not None:
                stack.enter_context(self._generators.restored())
            stack.enter_context(preserved(self._draws.drawn))
            self._draws.restore()
            if getattr(self.module, "inplace", False):  # the argument may be a dropped tensor
                self.module.__dict__["inplace"] = False
                stack.callback(self.module.__dict__.update, inplace=True)
            yield


def kept_tensor(tensor: torch.Tensor, hooks: Hooks) -> SavedTensor:
    """Return a tensor kept by hooks of saved tensors."""
    saved = SavedTensor(tensor.detach())
    saved.keep(hooks)
    return saved


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage; 0 where it has none."""
    return storage_key_of(tensor) if tensor.layout is torch.strided else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _not_unpacked(packed: object) -> torch.Tensor:
    raise AssertionError("a recomputed graph is not differentiated")

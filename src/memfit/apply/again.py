"""Calls of modules that run again in the backward pass, for what autograd saved in them and what they made.

`memfit.apply.lean` has the rules.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.apply import probe
from memfit.apply.containers import Value, mapped
from memfit.apply.frame import autocast_state, graph_task, statistics_untouched
from memfit.apply.generators import Draws, Generators, preserved, sources
from memfit.errors import RecomputationError
from memfit.held_state import own_generators

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Of saved tensors: pack and unpack."""

_SMALL = 4  # what a call saves inside is kept where its output is this many times larger


class Saved:
    """What autograd holds in place of a tensor.

    Attributes:
        tensor: The tensor while it is not decided what becomes of it; later, made again for a backward pass.
        task: That backward pass.
        call: The call that makes it again; None where it is kept.
        place: In the output of that call (shape, strides, offset), or among what is saved inside (its number).
        before: What is known of the tensor, where what is made again is probed or checked; otherwise None.
    """

    __slots__ = ("__weakref__", "before", "call", "packed", "place", "task", "tensor", "unpack")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.task: int | None = None
        self.packed: Any = None
        self.unpack: Callable[[Any], torch.Tensor] = _never
        self.call: Call | None = None
        self.place: Any = None
        self.before: probe.Saved | None = None

    def keep(self, hooks: Hooks) -> None:
        """Give the tensor to hooks of saved tensors."""
        assert self.tensor is not None
        pack, self.unpack = hooks
        self.packed, self.tensor = pack(self.tensor), None

    def drop(self, call: Call, number: int | None = None) -> None:
        """Have the tensor made again by a call: as its output, or as the tensor saved inside of a number."""
        assert self.tensor is not None
        strides = self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        self.call, self.place = call, strides if number is None else number
        self.before, self.tensor = probe.saved(self.tensor), None
        call.waiting.append(weakref.ref(self))

    def fill(self, task: int, output: torch.Tensor, inside: Mapping[int, torch.Tensor]) -> None:
        """Hold what was made again until the backward pass takes it, which it does once."""
        if task != self.task:
            is_inside = isinstance(self.place, int)
            self.task, self.tensor = task, inside[self.place] if is_inside else output.as_strided(*self.place)

    def difference(self) -> str | None:
        """Return how what was made again differs; where all is kept to compare with, go on with what was kept."""
        if self.before is None or self.tensor is None:
            return None
        how = self.before.difference(self.tensor)
        self.tensor = self.tensor if self.before.original is None else self.before.original
        return how

    def take(self) -> torch.Tensor:
        """Return the tensor."""
        if self.call is None:
            return self.unpack(self.packed)
        task = graph_task()
        if self.task != task or self.tensor is None:
            self.task = None
            self.call.run(task, self)
        made, self.tensor = self.tensor, None
        assert made is not None
        return made


class Call:
    """One call of a lean module.

    Attributes:
        module: The module.
        saves: What autograd saves in it, in order.
        waiting: What it makes again.
        version: Of its output, as it came out.
        dtype: Of its output.
    """

    def __init__(self, fqn: str, module: nn.Module, given: Any, call_of: Callable[[torch.Tensor], Call | None]) -> None:
        self.fqn, self.module, self._trains = fqn, module, module.training
        self.saves: list[Saved] = []
        self.waiting: list[weakref.ref[Saved]] = []
        self._tensors: list[torch.Tensor] = []
        self._given = mapped(given, torch.Tensor, self._number)
        self._versions = [tensor._version for tensor in self._tensors]
        self._arguments: list[Call | Saved | None] = [call_of(tensor) for tensor in self._tensors]
        self._needs_gradient = [tensor.requires_grad for tensor in self._tensors]
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.training
        is_foreign = not type(module).__module__.startswith("torch.")  # it may draw from anything
        self._generators = Generators.of(self._tensors) if drops or is_foreign else None
        self._draws = Draws(sources(own_generators(module))) if is_foreign else Draws(())
        self._is_sure_to_draw = drops
        self._autocast = autocast_state()

    def _number(self, tensor: torch.Tensor) -> Value:
        self._tensors.append(tensor)
        return Value(len(self._tensors) - 1)

    def finish(self, output: Any, hooks: Hooks) -> bool:
        """Decide what becomes of what was saved; tell whether the output can be made again, and that pays.

        Args:
            output: What the module returned.
            hooks: Keep what is kept.
        """
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
                made or kept(tensor, hooks) for made, tensor in zip(self._arguments, self._tensors, strict=True)
            ]
            self.version, self.dtype = output._version, output.dtype
            self._made = _looks(output), len(self.saves)
            self._address = StorageWeakRef(output.untyped_storage())  # no other storage gets it meanwhile
        self.saves, self._tensors = [], []
        return dropped is not None

    def _can_run_again(self, output: Any) -> bool:
        """Tell whether the call made a new tensor of arguments that are as they were, or are made again."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not storage_of(output):
            return False
        for tensor, version, made in zip(self._tensors, self._versions, self._arguments, strict=True):
            is_changed = tensor._version != version
            if not storage_of(tensor) or (is_changed and made is None):
                return False
            if storage_of(tensor) == storage_of(output) and not is_changed:
                return False
        return True

    def _droppable(self, output: torch.Tensor) -> set[int] | None:
        """Return the numbers of what was saved and need not be kept; None where keeping the arguments costs more."""
        given = list(zip(self._tensors, self._versions, self._arguments, strict=True))
        arguments = {(storage_of(tensor), version) for tensor, version, _ in given}
        there = {storage_of(tensor) for tensor, _, made in given if made is not None or tensor.is_leaf}
        held = (*self.module._parameters.values(), *self.module._buffers.values())
        own = {storage_of(tensor) for tensor in held if tensor is not None}
        large = _bytes(output) / _SMALL
        gains: dict[int, int] = {}
        dropped = set()
        for number, saved in enumerate(self.saves):
            if saved.tensor is None:
                continue
            key = storage_of(saved.tensor)
            if (key, saved.tensor._version) in arguments:
                there.add(key)
            elif key and key not in own and _bytes(saved.tensor) >= large:
                dropped.add(number)
                gains[key] = _bytes(saved.tensor)
        cost = sum({storage_of(t): _bytes(t) for t in self._tensors if storage_of(t) not in there}.values())
        return dropped if cost == 0 or cost < sum(gains.values()) else None

    def run(self, task: int, asked: Saved | None = None) -> torch.Tensor:
        """Run again, fill what waits for it in a backward pass, and return the output.

        Raises:
            RecomputationError: It does something else this time.
        """
        output, inside, count = self._run_again(task)
        if (_looks(output), count) != self._made:
            how = f"it makes {_looks(output)} and saves {count} tensors, and made {self._made[0]} with {self._made[1]}"
            raise RecomputationError((self.fqn,), self.fqn, how)
        for saved in self._waiting():
            if task >= 0 or saved is asked:  # outside of a backward pass, no other takes it
                saved.fill(task, output, inside)
                differing = saved.difference()
                if differing is not None:
                    probe.report(RecomputationError((self.fqn,), self.fqn, differing), output.device)
        return output

    def output(self, task: int) -> torch.Tensor:
        """Return the output, from what waits for it where it is there already."""
        for saved in self._waiting():
            if saved.task == task and saved.tensor is not None and not isinstance(saved.place, int):
                return saved.tensor.as_strided(*self._made[0][1:])
        return self.run(task)

    def _waiting(self) -> list[Saved]:
        return [saved for saved in (reference() for reference in self.waiting) if saved is not None]

    def _run_again(self, task: int) -> tuple[torch.Tensor, dict[int, torch.Tensor], int]:
        """Run again; return the output, what is saved inside and waited for, and how much is saved."""
        places = {saved.place for saved in self._waiting()}
        inside: dict[int, torch.Tensor] = {}
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count in places:
                inside[count] = tensor.detach()
            count += 1

        args, kwargs = self._values(task)
        with saved_tensors_hooks(pack, _never), torch.enable_grad(), self._as_before():
            output = self.module(*args, **kwargs)
        return output.detach(), inside, count

    def _values(self, task: int) -> Any:
        """Return the arguments."""
        values = [
            (made.output(task) if isinstance(made, Call) else made.take()).detach().requires_grad_(needs)
            for made, needs in zip(self._arguments, self._needs_gradient, strict=True)
            if made is not None
        ]
        return mapped(self._given, Value, lambda value: values[value.number])

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set back what the call depends on besides its arguments, until the context is left."""
        with contextlib.ExitStack() as stack:
            for device, (enabled, dtype, cache) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            stack.callback(self.module.__dict__.update, training=self.module.training)
            self.module.training = self._trains
            if isinstance(self.module, nn.modules.batchnorm._NormBase):
                stack.enter_context(statistics_untouched([self.module]))
            if self._generators is not None:
                stack.enter_context(self._generators.again())
            stack.enter_context(preserved(self._draws.drawn))
            self._draws.restore()
            if getattr(self.module, "inplace", False):  # the argument may be waited for
                self.module.__dict__["inplace"] = False
                stack.callback(self.module.__dict__.update, inplace=True)
            yield


def kept(tensor: torch.Tensor, hooks: Hooks) -> Saved:
    """Return a tensor as hooks of saved tensors keep it."""
    saved = Saved(tensor.detach())
    saved.keep(hooks)
    return saved


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _never(packed: object) -> torch.Tensor:
    raise AssertionError("what is made again is not differentiated")

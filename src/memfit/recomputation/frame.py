"""One pass through a region, whose saved tensors are recomputed when the backward pass unpacks them.

The rules are those of non-reentrant `torch.utils.checkpoint` (see the notes there), for the calls of several modules
as for one. The code of the modules' parent between the calls is not touched. Regions within are checkpointed again, and
a backward pass within the recomputation works: its graph holds its own tensors.

A frame is alive as long as autograd's hooks are, and nothing in it refers to the graph that it belongs to.

Lean modules are recomputed by hooks of their own (`recomputation.lean_modules`): a region drops all that autograd saves
while it runs, told by its order; of a lean module's output it is later operators that save views, told by its storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit._torch import (
    DeviceContext,
    InstanceNormBase,
    current_graph_task_id,
    disable_dynamo,
    get_current_function_mode_stack,
    skip,
    storage_key_of,
    version_of,
)
from memfit.errors import MemfitError, RecomputationError
from memfit.recomputation import probe
from memfit.recomputation.call_state import (
    CallState,
    ForeignGenerator,
    Placeholder,
    autocast_state,
    mapped,
    running_again,
    tensors_in,
)
from memfit.recomputation.kept_outputs import (
    ChangedError,
    HostCopy,
    KeepingMode,
    KeptOutputs,
    ReusingMode,
    as_it_is,
    hooks_around,
    is_worth_moving,
)
from memfit.workload import has_history

_outside_of_backward = itertools.count(-2, -1)


def graph_task() -> int:
    """Return the number of the running backward pass; outside of one, a new negative number."""
    task = current_graph_task_id()
    return next(_outside_of_backward) if task == -1 else task


class Holder:
    """The object that autograd holds in place of a saved tensor of a region."""

    __slots__ = ("__weakref__", "device", "dtype", "expected", "mismatch", "recomputed", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.recomputed: dict[int, torch.Tensor] = {}  # by the backward pass that needs it, until it is unpacked
        self.expected = probe.expected(tensor)
        # The FQN of the module that made a differing tensor, how it differs, and its checksum when autograd saved it:
        # its operator may not have run yet.
        self.mismatch: tuple[str, str, int | None] | None = None


class _Save(torch.autograd.Function):
    """A function that saves tensors through autograd, so that the hooks of a region around this one get them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Stop(BaseException):
    """The end of a recomputation, at its last needed tensor. No `except Exception` of the user's catches it."""

    def __init__(self, filling: _Filling) -> None:
        self.filling = filling


@dataclasses.dataclass
class _Call:
    module: str
    forward: Callable[..., Any]
    given: Any
    state: CallState
    outputs: Sequence[int] = ()


@dataclasses.dataclass
class _ParentTensor:
    tensor: weakref.ref[torch.Tensor]
    version: int
    number: int


class Frame:
    """One pass through a region.

    Args:
        modules: The FQNs of the region's modules.
        inside: The region's modules and their submodules.
        normalisations: The modules among them that track statistics.
        kept: The outputs of operators that are kept; None for none.
        offload: Whether arguments with a gradient wait in host memory.
        foreign: Generators besides PyTorch's own that the calls may draw from.
    """

    drops_saved_tensors = True

    def __init__(
        self,
        modules: tuple[str, ...],
        inside: Sequence[nn.Module],
        normalisations: Sequence[nn.Module],
        kept: KeptOutputs | None,
        offload: bool,
        foreign: Sequence[ForeignGenerator],
    ) -> None:
        _hide_from_the_compiler()
        self.modules, self._inside, self.normalisations = modules, inside, normalisations
        self._kept, self._offload = kept, offload
        self._foreign = foreign
        self._offloaded: dict[int, HostCopy] = {}
        self.last = -1  # the position in the region of the module called last
        self.closed = False  # whether no further call belongs to it
        self.holders: list[weakref.ref[Holder]] = []
        self._thread = threading.get_ident()
        self._hooks = hooks_around()
        self._device = next(
            (mode for mode in reversed(get_current_function_mode_stack()) if isinstance(mode, DeviceContext)), None
        )
        self._calls: list[_Call] = []
        self._saved: list[tuple[torch.Tensor, list[tuple[int, bool]]]] = []
        self._known: dict[int, _ParentTensor] = {}
        self._last_use: list[int] = []
        self.running = modules[0]  # the module being recomputed
        self._differences, self._is_probed, self._is_reported = probe.current(), False, False

    def continues_with(self, position: int) -> bool:
        """Tell whether a call of the module at a position continues this pass."""
        return (
            not self.closed
            and position > self.last
            and self._thread == threading.get_ident()
            and self._calls[0].state.autocast == autocast_state()
            and self._hooks == hooks_around()
        )

    def call(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's forward pass, in which autograd saves holders instead of tensors."""
        self.last = position
        self.closed |= position == len(self.modules) - 1
        self._calls.append(self._record(position, forward, args, kwargs))
        keeping = None if self._kept is None else KeepingMode(self._kept)
        with saved_tensors_hooks(self._pack, self._unpack):
            out = _run(self.modules[position], forward, args, kwargs, keeping)
        self._calls[-1].state.end()
        for copy in self._host_copies():
            copy.land()
        if not self.closed:
            self._calls[-1].outputs = [self._know(t) for t in tensors_in(out)]
        return out

    def prefetch(self) -> None:
        """Begin to copy offloaded tensors back from host memory."""
        for copy in self._host_copies():
            copy.prefetch()

    def _host_copies(self) -> list[HostCopy]:
        kept = self._kept.offloaded if self._kept is not None else None
        return [*self._offloaded.values(), *(kept or ())]

    def _record(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> _Call:
        """Return the record of a call; save the argument tensors that are no outputs of earlier calls."""
        tensors: list[torch.Tensor] = []
        fresh: dict[int, torch.Tensor] = {}

        def number(tensor: torch.Tensor) -> Any:
            if tensor.is_inference():  # autograd does not save inference tensors, nor do they change
                return tensor
            tensors.append(tensor)
            known = self._known.get(id(tensor))
            if known is None or known.tensor() is not tensor or known.version != version_of(tensor):
                fresh[self._know(tensor)] = tensor
            argument = self._known[id(tensor)].number
            self._last_use[argument] = len(self._calls)
            return Placeholder(argument)

        given = mapped((args, kwargs), torch.Tensor, number)
        if self._offload:
            movable = [n for n, t in fresh.items() if is_worth_moving(t) and has_history(t)]
            self._offloaded |= {n: HostCopy(fresh.pop(n).detach()) for n in movable}
        if fresh:
            # Detached: with their history they would hold the graph that holds this frame.
            held = [t if t.is_leaf else t.detach() for t in fresh.values()]
            history = [(n, t.requires_grad and not t.is_leaf) for n, t in fresh.items()]
            anchor = torch.empty(0, requires_grad=True)
            self._saved.append((_Save.apply(anchor, held), history))  # type: ignore[no-untyped-call]
        return _Call(self.modules[position], forward, given, CallState(self._inside, tensors, self._foreign))

    def _know(self, tensor: torch.Tensor) -> int:
        number = len(self._last_use)
        self._last_use.append(-1)
        if not tensor.is_inference():
            self._known[id(tensor)] = _ParentTensor(weakref.ref(tensor), version_of(tensor), number)
        return number

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(tensor)
        if holder.expected is not None and self._is_statistic(tensor):  # it is updated before the recomputation
            holder.expected.is_compared = False
        self.holders.append(weakref.ref(holder))
        return holder

    def _is_statistic(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a running statistic, repeated for each sample by instance normalisation."""
        if tensor.layout is not torch.strided or tensor.dim() != 1:
            return False
        statistics = {storage_key_of(t) for m in self.normalisations for t in m.buffers(recurse=False)}
        tracking = [m for m in self.normalisations if isinstance(m, InstanceNormBase)]
        repeated = any(m.track_running_stats and len(tensor) % m.num_features == 0 for m in tracking)
        return repeated or storage_key_of(tensor) in statistics

    def _unpack(self, holder: Holder) -> torch.Tensor:
        task = graph_task()
        if self._differences is not None and holder.expected is not None and holder.expected.original is not None:
            if not self._is_probed:
                self._is_probed = True
                try:
                    self._recompute(task)
                except RecomputationError as e:
                    self._differences.setdefault(e.modules, e)
            return holder.expected.original
        if task not in holder.recomputed:
            self._recompute(task)
        if task not in holder.recomputed:
            raise self._differs("a tensor of the forward pass was not saved again")
        recomputed = holder.recomputed.pop(task)
        if holder.mismatch is not None:
            module, how, checksum = holder.mismatch
            if probe.checksum(recomputed) == checksum:  # else its operator wrote to it after autograd saved it
                self._report(RecomputationError(self.modules, module, how), recomputed.device)
        return recomputed

    @disable_dynamo
    def _recompute(self, task: int) -> None:
        """Run the calls again, up to the last tensor that a holder waits for; raise where they differ from before."""
        self.closed = True
        filling = _Filling(self, task)
        states = [call.state for call in self._calls]
        reusing = (
            None
            if self._kept is None
            else ReusingMode(
                self._kept, self._is_statistic, lambda how, device: self._report(self._differs(how), device)
            )
        )
        try:
            values = self._inputs()
            with (
                saved_tensors_hooks(filling.pack, as_it_is),
                torch.enable_grad(),
                running_again(states, self._inside, self.normalisations),
                self._device or contextlib.nullcontext(),
            ):
                try:
                    self._run_again(values, reusing)
                except _Stop as stop:
                    if stop.filling is not filling:
                        raise
            if filling.count <= filling.end:
                raise self._differs(f"it saved {filling.count} tensors; the forward pass saved {len(self.holders)}")
            for tensor, expected, module in filling.probed:  # after the operators that may still write to them
                how = expected.difference(tensor)
                if how is not None:
                    raise RecomputationError(self.modules, module, how)
        except (MemfitError, torch.OutOfMemoryError):
            raise
        except ChangedError as e:
            raise self._differs("an argument was changed in place before its copy to host memory was complete") from e
        except Exception as e:
            raise self._differs(f"{type(e).__name__}: {e}") from e

    def _run_again(self, values: dict[int, torch.Tensor], reusing: ReusingMode | None) -> None:
        """Run the calls; each value is dropped after the last call that takes it."""
        for index, call in enumerate(self._calls):
            self.running = call.module
            call.state.restore()
            args, kwargs = mapped(call.given, Placeholder, lambda value: values[value.number])
            for number in [n for n in values if self._last_use[n] <= index]:
                del values[number]
            out = _run(call.module, call.forward, args, kwargs, reusing)
            del args, kwargs
            outputs = zip(call.outputs, tensors_in(out), strict=False)
            values.update((number, tensor) for number, tensor in outputs if self._last_use[number] > index)
            del out, outputs

    def _inputs(self) -> dict[int, torch.Tensor]:
        self.prefetch()
        values: dict[int, torch.Tensor] = {}
        for saved, history in self._saved:
            node: Any = saved.grad_fn
            for (number, requires_grad), tensor in zip(history, node.saved_tensors, strict=True):
                values[number] = tensor.detach().requires_grad_() if requires_grad else tensor
        for number, copy in self._offloaded.items():
            values[number] = copy.take().requires_grad_()
        return values

    def _report(self, error: RecomputationError, device: torch.device) -> None:
        if not self._is_reported:  # once
            self._is_reported = True
            probe.report(error, device)

    def _differs(self, how: str) -> RecomputationError:
        return RecomputationError(self.modules, self.running, how)


class _Filling:
    """Hooks of a recomputation, which give a frame's holders the tensors that autograd saves again."""

    drops_saved_tensors = True

    def __init__(self, frame: Frame, task: int) -> None:
        self.frame, self.task = frame, task
        self.holders = [holder() for holder in frame.holders]
        self.end = max((i for i, holder in enumerate(self.holders) if holder is not None), default=-1)
        self.count = 0
        self.probed: list[tuple[torch.Tensor, probe.Expected, str]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach() if tensor.requires_grad else tensor
        index = self.count
        self.count += 1
        holder = self.holders[index] if index <= self.end else None
        if holder is not None:
            now, before = (plain.shape, plain.dtype, plain.device), (holder.shape, holder.dtype, holder.device)
            if now != before:
                raise self.frame._differs(f"it saved {_described(*now)}; the forward pass saved {_described(*before)}")
            if holder.expected is not None and holder.expected.original is not None:
                self.probed.append((plain, holder.expected, self.frame.running))
            else:
                how = None if holder.expected is None else holder.expected.difference(plain)
                holder.mismatch = (self.frame.running, how, probe.checksum(plain)) if how else None
                holder.recomputed[self.task] = plain
        if index >= self.end:
            raise _Stop(self)
        return plain


def _run(
    module: str, forward: Callable[..., Any], args: Any, kwargs: Any, mode: KeepingMode | ReusingMode | None
) -> Any:
    return forward(*args, **kwargs) if mode is None else mode.run_region(module, forward, args, kwargs)


@functools.cache
def _hide_from_the_compiler() -> None:
    """Exclude from Dynamo the hooks that autograd calls in compiled code; imports Dynamo, which takes seconds."""
    for hook in (Holder.__init__, Frame._pack, Frame._unpack, _Filling.pack):
        skip(hook)


def _described(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"a tensor of shape {list(shape)} and {str(dtype)[6:]} on {device}"

"""One pass through a region: what autograd saved in it is computed again when the backward pass asks for it.

The rules are those of non-reentrant `torch.utils.checkpoint` (see the notes there), for the calls of several modules
as for one:

1. Inside the calls, autograd gets a `Holder` in place of each tensor that it saves. The parent's code between the
   calls is not touched.
2. A tensor argument that is an output of an earlier call is not kept; it is wired to that output. Every other one is
   saved through autograd, by `_Save`, so that the hooks of a region around this one get it.
3. When the first holder is unpacked, the calls run again, in their order, with the generators' states, autocast and
   device they had, and stop at the last tensor that a holder waits for. Regions within are checkpointed again.
4. What was recomputed belongs to one backward pass, and is let go of as it is unpacked.
5. A backward pass within the recomputation works: its graph holds its own tensors.

A frame is alive as long as autograd's hooks are, and nothing in it refers to the graph that it belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from memfit.apply import probe
from memfit.apply.containers import Value, mapped, tensors_in
from memfit.apply.generators import Draws, Generators, Source, preserved, sources
from memfit.apply.keep import Dropping, Keeping, Kept, Reusing, hooks_around
from memfit.apply.offload import Away, ChangedError, is_worth_moving
from memfit.errors import MemfitError, RecomputationError
from memfit.transfers import has_history

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_outside_of_backward = itertools.count(-2, -1)


def graph_task() -> int:
    """Return the number of the backward pass that is running; outside of one, a new negative one."""
    task = torch._C._current_graph_task_id()
    return next(_outside_of_backward) if task == -1 else task


class Differing(NamedTuple):
    """A recomputed tensor that differs from the one that was saved.

    Attributes:
        module: The FQN of the module that made it.
        how: What differs.
        checksum: Of the recomputed tensor, when autograd saved it: its operator may not have run yet.
    """

    module: str
    how: str
    checksum: int | None


class Holder:
    """What autograd holds in place of a tensor.

    Attributes:
        recomputed: The tensor again, by the backward pass that needs it.
        before: What is known of the tensor itself, where recomputations are probed or checked; otherwise None.
        differing: How what was recomputed differs from it; None where it does not.
    """

    __slots__ = ("__weakref__", "before", "device", "differing", "dtype", "recomputed", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.recomputed: dict[int, torch.Tensor] = {}
        self.before = probe.saved(tensor)
        self.differing: Differing | None = None


class _Save(torch.autograd.Function):
    """Saves tensors through autograd, so that its hooks get them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Stop(BaseException):
    """The last tensor that a recomputation is for was made. No `except Exception` of the user's catches it."""

    def __init__(self, filling: _Filling) -> None:
        self.filling = filling


@dataclasses.dataclass
class _Call:
    """One call of a module.

    Attributes:
        trains: Whether each module inside the region is in training mode as the call begins.
    """

    module: str
    forward: Callable[..., Any]
    given: Any
    generators: Generators
    draws: Draws
    trains: Sequence[bool]
    outputs: Sequence[int] = ()


@dataclasses.dataclass
class _Known:
    """A tensor object of the parent's, as it was when it went into a call or came out of one."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    number: int


class Frame(Dropping):
    """One pass through a region.

    Args:
        modules: The FQNs of the region.
        inside: Its modules and those within them.
        normalisations: Modules within that track statistics.
        kept: The outputs of operators that are kept all the same.
        offload: Whether arguments that have a gradient wait in host memory.
        among: Generators besides PyTorch's own that the calls may draw from; None for Python's and NumPy's.

    Attributes:
        last: The position in the region of the module called last.
        closed: Whether no further call belongs to it.
        running: The FQN of the module that runs again.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        inside: Sequence[nn.Module],
        normalisations: Sequence[nn.Module],
        kept: Kept | None,
        offload: bool = False,
        among: Sequence[Source] | None = None,
    ) -> None:
        _hide_from_the_compiler()
        self.modules, self._inside, self.normalisations = modules, inside, normalisations
        self._kept, self._offload = kept, offload
        self._among = sources() if among is None else among
        self._away: dict[int, Away] = {}
        self.last = -1
        self.closed = False
        self.holders: list[weakref.ref[Holder]] = []
        self._thread = threading.get_ident()
        self._autocast = autocast_state()
        self._hooks = hooks_around()
        self._device = next(
            (mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, DeviceContext)), None
        )
        self._calls: list[_Call] = []
        self._saved: list[tuple[torch.Tensor, list[tuple[int, bool]]]] = []
        self._known: dict[int, _Known] = {}
        self._last_use: list[int] = []
        self.running = modules[0]
        self._differences, self._is_probed, self._is_reported = probe.current(), False, False

    def takes(self, position: int) -> bool:
        """Tell whether a call of the module at a position follows on."""
        return (
            not self.closed
            and position > self.last
            and self._thread == threading.get_ident()
            and self._autocast == autocast_state()
            and self._hooks == hooks_around()
        )

    def call(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's forward pass; autograd saves nothing of it."""
        self.last = position
        self.closed |= position == len(self.modules) - 1
        self._calls.append(self._noted(position, forward, args, kwargs))
        keeping = Keeping(self._kept) if self._kept is not None else contextlib.nullcontext()
        with saved_tensors_hooks(self._pack, self._unpack), keeping:
            out = forward(*args, **kwargs)
        self._calls[-1].draws.end()
        for one in self._sent():
            one.land()
        if not self.closed:
            self._calls[-1].outputs = [self._know(t) for t in tensors_in(out)]
        return out

    def prefetch(self) -> None:
        """Begin to copy back what waits in host memory."""
        for one in self._sent():
            one.prefetch()

    def _sent(self) -> list[Away]:
        kept = self._kept.sent if self._kept is not None else None
        return [*self._away.values(), *(kept or ())]

    def _noted(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> _Call:
        """Return a call to be run again; save the tensors that it takes from outside."""
        tensors: list[torch.Tensor] = []
        fresh: dict[int, torch.Tensor] = {}

        def number(tensor: torch.Tensor) -> Any:
            if tensor.is_inference():  # autograd does not save them, nor do they change
                return tensor
            tensors.append(tensor)
            known = self._known.get(id(tensor))
            if known is None or known.tensor() is not tensor or known.version != tensor._version:
                fresh[self._know(tensor)] = tensor
            found = self._known[id(tensor)].number
            self._last_use[found] = len(self._calls)
            return Value(found)

        given = mapped((args, kwargs), torch.Tensor, number)
        if self._offload:
            movable = [n for n, t in fresh.items() if is_worth_moving(t) and has_history(t)]
            self._away |= {n: Away(fresh.pop(n).detach()) for n in movable}
        if fresh:
            # Detached: with their history they would hold the graph that holds this frame.
            held = [t if t.is_leaf else t.detach() for t in fresh.values()]
            history = [(n, t.requires_grad and not t.is_leaf) for n, t in fresh.items()]
            anchor = torch.empty(0, requires_grad=True)
            self._saved.append((_Save.apply(anchor, held), history))  # type: ignore[no-untyped-call]
        trains = [module.training for module in self._inside]
        return _Call(self.modules[position], forward, given, Generators.of(tensors), Draws(self._among), trains)

    def _know(self, tensor: torch.Tensor) -> int:
        number = len(self._last_use)
        self._last_use.append(-1)
        if not tensor.is_inference():
            self._known[id(tensor)] = _Known(weakref.ref(tensor), tensor._version, number)
        return number

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(tensor)
        if holder.before is not None and self._is_statistic(tensor):  # which moves on before it is recomputed
            holder.before.is_compared = False
        self.holders.append(weakref.ref(holder))
        return holder

    def _is_statistic(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a running statistic, or as many of them as instances are normalised together."""
        if tensor.layout is not torch.strided or tensor.dim() != 1:
            return False
        statistics = {t.untyped_storage()._cdata for m in self.normalisations for t in m.buffers(recurse=False)}
        tracking = [m for m in self.normalisations if isinstance(m, nn.modules.instancenorm._InstanceNorm)]
        repeated = any(m.track_running_stats and len(tensor) % m.num_features == 0 for m in tracking)
        return repeated or tensor.untyped_storage()._cdata in statistics

    def _unpack(self, holder: Holder) -> torch.Tensor:
        task = graph_task()
        if self._differences is not None and holder.before is not None and holder.before.original is not None:
            self._probe(self._differences, task)
            return holder.before.original
        if task not in holder.recomputed:
            self._recompute(task)
        if task not in holder.recomputed:
            raise self._differs("a tensor that was saved before was not made again")
        made = holder.recomputed.pop(task)
        if holder.differing is not None:
            self._check(made, holder.differing)
        return made

    def _probe(self, differences: probe.Differences, task: int) -> None:
        """Recompute once, and note what differs."""
        if self._is_probed:
            return
        self._is_probed = True
        try:
            self._recompute(task)
        except RecomputationError as e:
            differences.setdefault(e.modules, e)

    @_disable_dynamo
    def _recompute(self, task: int) -> None:
        """Run the calls again up to the last tensor that a holder waits for.

        Raises:
            RecomputationError: They do something else this time.
        """
        self.closed = True
        filling = _Filling(self, task)
        try:
            values = self._inputs()
            with saved_tensors_hooks(filling.pack, _as_it_is), torch.enable_grad(), self._as_before():
                self._run_again(values)
            if filling.count <= filling.end:
                raise self._differs(f"{filling.count} tensors were saved where {len(self.holders)} were before")
            self.compare(filling.probed)
        except _Stop as stop:
            if stop.filling is not filling:
                raise
            self.compare(filling.probed)
        except (MemfitError, torch.OutOfMemoryError):
            raise
        except ChangedError as e:
            raise self._differs("an argument was changed in place on its way to host memory") from e
        except Exception as e:
            raise self._differs(f"{type(e).__name__}: {e}") from e

    def _run_again(self, values: dict[int, torch.Tensor]) -> None:
        """Run the calls; a value is let go of after the last call that takes it."""
        for index, call in enumerate(self._calls):
            self.running = call.module
            call.generators.restore()
            call.draws.restore()
            _set_modes(self._inside, call.trains)
            args, kwargs = mapped(call.given, Value, lambda value: values[value.number])
            for number in [n for n in values if self._last_use[n] <= index]:
                del values[number]
            out = call.forward(*args, **kwargs)
            del args, kwargs
            made = zip(call.outputs, tensors_in(out), strict=False)
            values.update((number, tensor) for number, tensor in made if self._last_use[number] > index)
            del out, made

    def _inputs(self) -> dict[int, torch.Tensor]:
        self.prefetch()
        values: dict[int, torch.Tensor] = {}
        for saved, history in self._saved:
            node: Any = saved.grad_fn
            for (number, requires_grad), tensor in zip(history, node.saved_tensors, strict=True):
                values[number] = tensor.detach().requires_grad_() if requires_grad else tensor
        for number, away in self._away.items():
            values[number] = away.take().requires_grad_()
        return values

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set back what the calls depend on besides their arguments, until the context is left."""
        generators = [call.generators for call in self._calls]
        kind = generators[0].kind
        devices = {d for g in generators if g.kind == kind for d in g.devices}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(sorted(devices), device_type=kind if devices else "cuda"))
            stack.enter_context(preserved({id(s): s for call in self._calls for s in call.draws.drawn}.values()))
            for device, (enabled, dtype, cache) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            stack.enter_context(statistics_untouched(self.normalisations))
            stack.callback(_set_modes, self._inside, [module.training for module in self._inside])
            if self._kept is not None:
                stack.enter_context(Reusing(self._kept))
            if self._device is not None:
                stack.enter_context(self._device)
            yield

    def compare(self, made: Sequence[tuple[torch.Tensor, probe.Saved, str]]) -> None:
        """Compare tensors with those that were saved before, once the operators that made them are done with them.

        Raises:
            RecomputationError: Some differ.
        """
        for found, before, module in made:
            how = before.difference(found)
            if how is not None:
                raise RecomputationError(self.modules, module, how)

    def _check(self, found: torch.Tensor, differing: Differing) -> None:
        """Report a tensor that differs from the one that was saved, unless its operator wrote to it after that.

        Raises:
            RecomputationError: It differs where kernels give the same bits each time.
        """
        if probe.checksum(found) == differing.checksum and not self._is_reported:
            self._is_reported = True
            probe.report(RecomputationError(self.modules, differing.module, differing.how), found.device)

    def _differs(self, how: str) -> RecomputationError:
        return RecomputationError(self.modules, self.running, how)


class _Filling(Dropping):
    """Gives the holders of a frame the tensors that autograd saves while the frame's calls run again."""

    def __init__(self, frame: Frame, task: int) -> None:
        self.frame, self.task = frame, task
        self.holders = [holder() for holder in frame.holders]
        self.end = max((i for i, holder in enumerate(self.holders) if holder is not None), default=-1)
        self.count = 0
        self.probed: list[tuple[torch.Tensor, probe.Saved, str]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach() if tensor.requires_grad else tensor
        index = self.count
        self.count += 1
        holder = self.holders[index] if index <= self.end else None
        if holder is not None:
            found, expected = (plain.shape, plain.dtype, plain.device), (holder.shape, holder.dtype, holder.device)
            if found != expected:
                raise self.frame._differs(f"{_described(*found)} was saved where {_described(*expected)} was before")
            if holder.before is not None and holder.before.original is not None:
                self.probed.append((plain, holder.before, self.frame.running))
            else:
                how = None if holder.before is None else holder.before.difference(plain)
                holder.differing = Differing(self.frame.running, how, probe.checksum(plain)) if how else None
                holder.recomputed[self.task] = plain
        if index >= self.end:
            raise _Stop(self)
        return plain


@functools.cache
def _hide_from_the_compiler() -> None:
    """Have the compiler leave out what autograd calls from compiled code; imports it, which takes seconds."""
    from torch._dynamo.decorators import skip

    for hook in (Holder.__init__, Frame._pack, Frame._unpack, _Filling.pack):
        skip(hook)


def _described(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"a tensor of shape {list(shape)} and {str(dtype)[6:]} on {device}"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def autocast_state() -> dict[str, tuple[bool, torch.dtype, bool]]:
    """Return whether autocast is on, its dtype and its cache, for the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    cache = torch.is_autocast_cache_enabled()
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in kinds}


def _set_modes(modules: Sequence[nn.Module], trains: Sequence[bool]) -> None:
    """Set modules to training or evaluation mode, each by itself."""
    for module, is_training in zip(modules, trains, strict=True):
        if module.training != is_training:
            module.training = is_training


@contextlib.contextmanager
def statistics_untouched(normalisations: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute on copies of running statistics: a batch counts once, and as many tensors are saved as before."""
    originals = [(m, name, m._buffers[name]) for m in normalisations for name in _STATISTICS]
    for module, name, buffer in originals:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer

"""A recorder of a running training loop, which writes its step to a tape and changes nothing that the loop computes."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from memfit._torch import (
    compiles,
    get_current_function_mode,
    own_modules,
    own_parameters,
    pop_function_mode,
    pop_function_mode_temporarily,
    push_function_mode,
    replaced,
    tree_map,
    version_of,
)
from memfit.errors import MemfitError
from memfit.workload import (
    BatchTensor,
    CallNumber,
    Entry,
    EntryArguments,
    ExecutionContext,
    Extent,
    ModuleTensor,
    RecordedStep,
    Reference,
    ResultTensor,
    leaves_of,
    map_tensors,
    with_phases,
)

MOST_ENTRIES = 100_000
_MET = 4  # of the replaced functions: those that Dynamo may meet in what it compiles
_GET_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class Verdict(BaseException):
    """Carries an error of memfit through the user's loop, past `except Exception` in it and in its libraries.

    Raised within a loop, an `Exception` would be one that the loop handles: a batch that it skips, a line in its log.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


_STAND_IN = torch.empty(0, device="meta")

SeenCall = tuple[int, int, int]
"""A call of a module that trains: its root, how many of its parameters are trained, its number within the pass."""

_Owner = nn.Module | torch.optim.Optimizer
_GRAD: SeenCall = (-1, 0, 0)  # a call of `torch.autograd.grad`


@dataclass
class Seen:
    """What a step did, as far as it tells whether another step takes more.

    Attributes:
        passes: The calls before each backward pass.
        updates: Classes of the optimizers that updated, with the numbers of their parameters.
        calls: Those since the last backward pass.
    """

    passes: set[frozenset[SeenCall]] = field(default_factory=set)
    updates: set[tuple[str, int]] = field(default_factory=set)
    calls: set[SeenCall] = field(default_factory=set)

    def is_in(self, others: Sequence[Seen]) -> bool:
        """Tell whether other steps together did all of it."""
        passes, updates = [p for o in others for p in o.passes], {u for o in others for u in o.updates}
        return self.updates <= updates and all(any(own <= known for known in passes) for own in self.passes)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class Watcher(TorchFunctionMode):
    """A function mode that records a loop's step between `begin` and `end`.

    The mode sees calls of PyTorch functions; replaced functions of PyTorch see calls of modules, backward passes,
    zeroing of gradients and custom functions; hooks of optimizers see updates. Between `rest` and `begin` the mode is
    off, and only calls, backward passes and updates are counted.

    Args:
        on_call: Called with each module that the loop itself calls, before it runs, and its arguments.
        on_backward: Called after each backward pass of the loop.
        on_elsewhere: Called with an optimizer that steps in another thread.

    Attributes:
        roots: Modules that the loop called, in the order of their first calls; of all steps.
        called: Modules that it called in this step.
        is_writing: Whether entries are recorded.
        fault: The reason why the tape can't be replayed; "" where it can.
        updates: The number of steps of each optimizer in this step, by its `id`.
        seen: What the step did so far.
        verdict: The error that ended the loop, from when it is raised there; None before.
    """

    def __init__(
        self,
        on_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
        on_backward: Callable[[], None],
        on_elsewhere: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        super().__init__()
        self._on_call, self._on_backward, self._on_elsewhere = on_call, on_backward, on_elsewhere
        self.verdict: Exception | None = None
        self.is_writing = self._is_over = self.is_paused = self._is_on = False
        self._records = True
        self._outer: Any = None
        self._depth = 0
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()
        self._replacements = self._replaced_functions()
        self._taken_out = 0
        self.roots: list[nn.Module] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._forget_all()

    def _forget_all(self) -> None:
        self.fault = ""
        self.entries: list[Entry] = []
        self.given: list[torch.Tensor] = []
        self._trained: dict[ModuleTensor, bool] = {}
        self._names: dict[int, ModuleTensor] = {}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Reference]] = {}
        self._without_gradient: list[torch.Tensor] = []
        self._calls: dict[CallNumber, Extent] = {}
        self._made = 0
        self.next_step()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer | None]:
        """The optimizers that have updated, by their numbers; None for those that are gone."""
        return [optimizer() for optimizer in self._optimizers]

    def next_step(self) -> None:
        """Begin to count the next step."""
        self.called: list[nn.Module] = []
        self._zeros: list[tuple[weakref.ref[_Owner], bool]] = []
        self._held: dict[nn.Module, list[nn.Parameter]] = {}
        self.updates: dict[int, int] = {}
        self.seen = Seen()

    def begin(self, within_step: bool = False) -> None:
        """Begin to record, if the function mode can be put on: with a step, or within the one that is under way."""
        called, updates, zeros = self.called, self.updates, self._zeros
        self._forget_all()
        if within_step:
            self.called, self.updates = called, updates
        self.is_writing = True
        for number in range(len(self.roots)):
            self._name(number)
        self.is_writing = self._records = self._put_on()
        for owner, how in zeros:  # calls that were made already: they may come before the first call of a step
            if self.is_writing and (held := owner()) is not None:
                self._write("function", zeroed, lambda *_: None, (_gradients_of(held), how), {})

    def end(self) -> RecordedStep:
        """Return what was recorded, and record no more."""
        self.is_writing = False
        entries, passes = with_phases(self.entries)
        self._known.clear()
        is_switched = any(  # other parameters are trained now than when the step began
            parameter.requires_grad != self._trained.get(ModuleTensor(number, name), parameter.requires_grad)
            for number, root in enumerate(self.roots)
            for name, parameter in root.named_parameters()
        )
        return RecordedStep(entries, passes, self.given, self._trained, is_switched, self._calls)

    def rest(self) -> None:
        """Only count, until `begin`."""
        self.is_writing = self._records = False
        self._forget_all()
        self._take_off()

    def is_steady(self) -> bool:
        """Tell whether the step is like those after it: none of the gradients that it looked for will be there then.

        What a loop does to gradients that exist (`if p.grad is not None: p.grad.zero_()`) is not in a first step.
        """
        return all(parameter.grad is None for parameter in self._without_gradient)

    def forget_roots(self) -> None:
        """Forget all modules and optimizers."""
        self._forget_all()
        self.roots, self._optimizers = [], []

    def stop(self) -> None:
        """Stop watching: the rest of the loop runs untouched."""
        self.is_writing, self._is_over = False, True
        self._forget_all()
        self._stack.close()

    @contextlib.contextmanager
    def paused(self, is_bare: bool = True) -> Iterator[None]:
        """Ignore the calls in this context, which are no part of the loop.

        Args:
            is_bare: Whether PyTorch has its own functions there. That takes time: Python looks methods up anew in all
                classes of modules.
        """
        was_paused, self.is_paused = self.is_paused, True
        if is_bare:
            if not self._taken_out:
                self._replace(False, _MET)
            self._taken_out += 1
        on_top = get_current_function_mode() is self
        try:
            with pop_function_mode_temporarily() if on_top else contextlib.nullcontext():
                yield
        finally:
            self.is_paused = was_paused
            if self._is_over or not self._records:
                self._take_off()
            if is_bare:
                self._taken_out -= 1
                if not (self._taken_out or self._is_over):
                    self._replace(True, _MET)

    # Watching

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls in this context."""
        before = optimizers.register_optimizer_step_pre_hook(self._before_update)
        after = optimizers.register_optimizer_step_post_hook(self._after_update)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        self._replace(True)
        self._stack.callback(self._replace, False)
        self._outer = get_current_function_mode()
        self._put_on()
        self._stack.callback(self._take_off)
        try:
            yield
        finally:
            self.stop()
            self._take_off()  # another mode may have been above it in `stop`

    def _put_on(self) -> bool:
        """Put the function mode on; not within a mode of the loop's own, which would take it off in its own place."""
        if not self._is_on and get_current_function_mode() is self._outer:
            push_function_mode(self)
            self._is_on = True
        return self._is_on

    def _take_off(self) -> None:
        """Pop the function mode, where it is the innermost; under another one it stays, and does nothing."""
        if self._is_on and get_current_function_mode() is self:
            pop_function_mode()
            self._is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_seen() or func is torch.Tensor.backward:  # it calls `torch.autograd.backward`
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._write("function", torch.Tensor.unbind, torch.Tensor.unbind, args, kwargs))
        if func is torch.Tensor.__deepcopy__:  # its memo belongs to this one copy
            run = functools.partial(func, memo=args[1] if len(args) > 1 else kwargs["memo"])
            return self._write("function", _deep_copied, run, args[:1], {})
        return self._write("function", func, func, args, kwargs)

    def _call(self, kind: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of the loop, and record the call."""
        if self._is_seen():
            return self._write(kind, call, call, args, kwargs)
        if not self._is_looking():
            return call(*args, **kwargs)
        self._depth += 1  # modules that are recomputed within it are not called by the loop
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def _replaced_functions(self) -> list[tuple[Any, str, Any, Any]]:
        """Return the functions that run modules, backward passes and custom functions: owner, name, own, watched."""
        call_module, backward, grad = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
        apply = torch.autograd.Function.__dict__["apply"]

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Call a module, and record the call if the loop itself makes it and the module has parameters."""
            # It is paused for each module within another.
            if self.is_paused or not self._is_looking() or not self.held_by(module):
                return call_module(module, *args, **kwargs)
            with self.paused(is_bare=compiles()):  # Dynamo must find PyTorch's own functions
                with self._carried(Exception):
                    self._on_call(module, args, kwargs)
                if not any(known is module for known in self.called):
                    self.called.append(module)
                if not self.is_writing:
                    return call_module(module, *args, **kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                with self.paused(is_bare=compiles()):
                    return call_module(module, *args, **kwargs)

            is_seen = self._is_seen()
            return self._write("module", self._root(module), run, args, kwargs) if is_seen else run(*args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            with self._carried(MemfitError):  # it may find that a recomputation differs
                out = self._call("backward", backward, args, kwargs)
                if self._is_looking():
                    self.seen.passes.add(frozenset(self.seen.calls))
                    self.seen.calls.clear()
                    self._zeros.clear()
                    with replaced(self, "is_paused", True):
                        self._on_backward()
            return out

        def watched_grad(*args: Any, **kwargs: Any) -> Any:
            if self._is_looking():
                self.seen.calls.add(_GRAD)
            return self._call("function", grad, args, kwargs)

        def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call("function", apply.__get__(None, cls), args, kwargs)

        def watched_zero(zero_grad: Callable[..., None]) -> Callable[..., None]:
            def watched(owner: _Owner, set_to_none: bool = True) -> None:
                """Zero the gradients for the loop, and record that also where there are none."""
                if self._is_looking():
                    self._zeros.append((weakref.ref(owner), set_to_none))
                if self._is_seen():
                    run = functools.partial(zero_grad, owner, set_to_none=set_to_none)
                    self._write("function", zeroed, lambda *_: run(), (_gradients_of(owner), set_to_none), {})
                else:
                    zero_grad(owner, set_to_none=set_to_none)

            return watched

        zeroing = [(owner, owner.zero_grad) for owner in (torch.optim.Optimizer, nn.Module)]
        return [
            (nn.Module, "__call__", call_module, watched_call),
            (torch.autograd, "backward", backward, watched_backward),
            (torch.autograd, "grad", grad, watched_grad),
            (torch.autograd.Function, "apply", apply, classmethod(watched_apply)),
            *((owner, "zero_grad", zero_grad, watched_zero(zero_grad)) for owner, zero_grad in zeroing),
        ]

    def _replace(self, is_watched: bool, most: int | None = None) -> None:
        """Put the watched functions in place, or PyTorch's own; of the first `most` only."""
        for owner, name, own, watched in self._replacements[:most]:
            setattr(owner, name, watched if is_watched else own)

    @contextlib.contextmanager
    def _carried(self, kind: type[Exception]) -> Iterator[None]:
        """Remember an error of memfit's own, and raise it in a way that the loop does not handle."""
        try:
            yield
        except kind as e:
            self.verdict = e
            raise Verdict(e) from None

    def _is_seen(self) -> bool:
        return self.is_writing and self._is_looking()

    def _is_looking(self) -> bool:
        return not self._depth and self.is_here()

    def is_here(self) -> bool:
        """Tell whether a call or an update is one of the loop that is watched."""
        return not (self._is_over or self.is_paused) and threading.get_ident() == self._thread

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Record an update; where it calls a closure, after that has run."""
        if not self.is_here():
            if not self._is_over and threading.get_ident() != self._thread:
                self._on_elsewhere(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._depth += 1
        if closure is None:
            self._updated(optimizer)
            return None

        def wrapped() -> Any:
            try:
                with replaced(self, "_depth", 0):
                    return closure()
            finally:
                self._updated(optimizer)

        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        self.updates[id(optimizer)] = self.updates.get(id(optimizer), 0) + 1
        self.seen.updates.add((type(optimizer).__name__, len(parameters_of(optimizer))))
        if not any(known is optimizer for known in self.optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        if self.is_writing:
            number = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
            self.entries.append(Entry("update", number, EntryArguments(((), {}), ()), ExecutionContext.now()))

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_here():
            self._depth -= 1

    # Recording

    def _write(self, kind: Any, what: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth += 1  # nested calls are no part of the loop
        try:
            entry = Entry(kind, what, self._arguments(args, kwargs), ExecutionContext.now())
            versions = _versions(args, kwargs) if kind == "function" else []
            self.entries.append(entry)
            out = run(*args, **kwargs)
            outputs = leaves_of(out)
            entry.made = [self._make(tensor) for tensor in outputs]
            changed = kind == "function" and versions != _versions(args, kwargs)
        finally:
            self._depth -= 1
        if kind == "function" and what == _GET_GRADIENT and out is None and args[0].requires_grad:
            self._without_gradient.append(args[0])
        is_set = getattr(what, "__name__", "") == "__set__" or what is zeroed
        if kind == "function" and not (outputs or changed or is_set):  # it did nothing to tensors
            position = next(i for i in range(len(self.entries) - 1, -1, -1) if self.entries[i] is entry)
            del self.entries[position]
            if position:
                self.entries[position - 1].drops += entry.drops
        if len(self.entries) > MOST_ENTRIES:
            self.fault = self.fault or f"the step calls more than {MOST_ENTRIES:,} functions outside of its modules"
            self.is_writing = False
        return out

    def _arguments(self, args: Any, kwargs: Any) -> EntryArguments:
        references: list[Reference] = []

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            references.append(self._reference(tensor))
            return _STAND_IN

        # Copied, since the loop may change its lists and dicts later.
        own = tree_map(lambda leaf: leaf, (tuple(args), dict(kwargs)))
        template = map_tensors(stand_in, own)
        return EntryArguments(template, tuple(references))

    def _reference(self, tensor: torch.Tensor) -> Reference:
        if (known := self._known_as(tensor)) is not None:
            return known
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.requires_grad and not tensor.is_leaf:
            self.fault = self.fault or "a tensor was computed from parameters before the first module was called"
        self.given.append(tensor)
        return self._know(tensor, BatchTensor(len(self.given) - 1))

    def _make(self, tensor: torch.Tensor) -> int:
        if isinstance(known := self._known_as(tensor), ResultTensor):
            return known.number
        self._made += 1
        self._know(tensor, ResultTensor(self._made))
        return self._made

    def _known_as(self, tensor: torch.Tensor) -> Reference | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _know(self, tensor: torch.Tensor, reference: Reference) -> Reference:
        died = functools.partial(self._died, reference) if isinstance(reference, ResultTensor) else None
        self._known[id(tensor)] = (weakref.ref(tensor, died), reference)
        return reference

    def _died(self, reference: ResultTensor, _: object) -> None:
        if self.is_writing and self.entries:
            self.entries[-1].drops.append(reference.number)

    def _root(self, module: nn.Module) -> int:
        number = next((number for number, root in enumerate(self.roots) if root is module), len(self.roots))
        if number == len(self.roots):
            self.roots.append(module)
            self._name(number)
        return number

    def _name(self, number: int) -> None:
        """Know a root's parameters and buffers by their names."""
        root = self.roots[number]
        for name, tensor in [*root.named_buffers(), *root.named_parameters()]:
            named = self._names.setdefault(id(tensor), ModuleTensor(number, name))
            if isinstance(tensor, nn.Parameter) and self.is_writing:
                self._trained.setdefault(named, tensor.requires_grad)

    def note_extent(self, number: CallNumber, extent: Extent) -> None:
        """Note the arguments of a call that trains, while it is recorded."""
        before = self._calls.get(number)
        self._calls[number] = extent if before is None else before.joined(extent)

    def held_by(self, module: nn.Module) -> list[nn.Parameter]:
        """Return a module's parameters, looked up once in each step, in less time than `parameters()` takes."""
        if module not in self._held:
            modules, found = {id(module): module}, dict[int, nn.Parameter]()
            waiting = [module]
            while waiting:
                held = waiting.pop()
                found |= {id(p): p for p in own_parameters(held).values() if p is not None}
                for inner in own_modules(held).values():
                    if inner is not None and id(inner) not in modules:
                        modules[id(inner)] = inner
                        waiting.append(inner)
            self._held[module] = list(found.values())
        return self._held[module]

    def note_call(self, module: nn.Module) -> SeenCall:
        """Note a call that trains, before it runs."""
        number, trained = self._root(module), sum(p.requires_grad for p in self.held_by(module))
        call = number, trained, 1 + sum(known[0] == number for known in self.seen.calls)
        self.seen.calls.add(call)
        return call


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [version_of(t) for t in leaves_of((args, kwargs)) if not t.is_inference()]


def _gradients_of(owner: _Owner) -> list[torch.Tensor]:
    """Return the parameters whose gradients an optimizer's or a module's `zero_grad` zeroes."""
    return list(owner.parameters()) if isinstance(owner, nn.Module) else parameters_of(owner)


def zeroed(parameters: list[torch.Tensor], set_to_none: bool = True) -> None:
    """Zero the gradients of parameters, as `zero_grad` of optimizers and modules does."""
    for parameter in parameters:
        if parameter.grad is not None:
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()


def _deep_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; `copy.deepcopy` would read memory, which fake tensors don't have."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)

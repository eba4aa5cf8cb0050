"""A recorder of a running training loop, which writes its step to a tape and changes nothing that the loop computes."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from memfit._torch.dispatch import (
    get_current_function_mode,
    pop_function_mode,
    pop_function_mode_temporarily,
    push_function_mode,
)
from memfit._torch.pytree import tree_map
from memfit._torch.tensors import version_of
from memfit.batch import leaves_of, map_tensors
from memfit.errors import MemfitError
from memfit.tape import (
    Arguments,
    BatchTensor,
    Entry,
    ExecutionContext,
    ModuleTensor,
    Reference,
    ResultTensor,
    Tape,
    with_phases,
)

MOST_ENTRIES = 100_000


class Verdict(BaseException):
    """Carries an error of memfit through the user's loop, past `except Exception` in it and in its libraries.

    Raised within a loop, an `Exception` would be one that the loop handles: a batch that it skips, a line in its log.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


_SET = "__set__"
_STAND_IN = torch.empty(0, device="meta")


class Watcher(TorchFunctionMode):
    """A function mode that records a loop's step between `begin` and `end`.

    The mode sees calls of PyTorch functions; replaced functions of PyTorch see calls of modules, backward passes and
    custom functions; hooks of optimizers see updates.

    Args:
        on_call: Called with each module that the loop itself calls, before it runs, and its arguments.

    Attributes:
        entries: The entries of the tape so far.
        given: Tensors from outside the step that it used.
        roots: Modules that the loop called, in the order of their first calls.
        is_writing: Whether entries are recorded.
        fault: The reason why the tape can't be replayed; "" where it can.
        updates: The number of steps of each optimizer since `begin`, by its `id`.
        verdict: The error that ended the loop, from when it is raised there; None before.
    """

    def __init__(self, on_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._on_call = on_call
        self.verdict: Exception | None = None
        self.is_writing = self._is_over = self._is_paused = False
        self._depth = 0
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()
        self._replacement = _Replacement(self)
        self._reset()

    def _reset(self) -> None:
        self._forget_all()
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.fault = ""
        self._names: dict[int, ModuleTensor] = {}

    def _forget_all(self) -> None:
        self.entries: list[Entry] = []
        self.given: list[torch.Tensor] = []
        self.updates: dict[int, int] = {}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Reference]] = {}
        self._made = 0

    def begin(self) -> None:
        """Begin to record."""
        self._reset()
        self.is_writing = True

    def count(self) -> None:
        """Drop the entries, and only count updates from now on, of the same modules and optimizers."""
        self.is_writing = False
        self._forget_all()

    def end(self) -> Tape:
        """Return the tape, and record no more."""
        self.is_writing = False
        entries, passes = with_phases(self.entries)
        names = [""] if len(self.roots) == 1 else [f"{i}_{type(root).__name__}" for i, root in enumerate(self.roots)]
        self._known.clear()
        return Tape(entries, tuple(names), passes)

    def stop(self) -> None:
        """Stop watching: the rest of the loop runs untouched."""
        self.is_writing, self._is_over = False, True
        self._forget_all()
        self._stack.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the calls in this context, which are no part of the loop."""
        self._is_paused = True
        self._replacement.take()
        on_top = get_current_function_mode() is self
        try:
            with pop_function_mode_temporarily() if on_top else contextlib.nullcontext():
                yield
        finally:
            self._is_paused = False
            if self._is_over:
                self._take_off()
            else:
                self._replacement.put()

    # Watching

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls in this context."""
        before = optimizers.register_optimizer_step_pre_hook(self._before_update)
        after = optimizers.register_optimizer_step_post_hook(self._after_update)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        self._replacement.put()
        self._stack.callback(self._replacement.take)
        push_function_mode(self)
        self._stack.callback(self._take_off)
        try:
            yield
        finally:
            self.stop()
            self._take_off()  # another mode may have been above it in `stop`

    def _take_off(self) -> None:
        """Pop the function mode, where it is the innermost; under another one it stays, and does nothing."""
        if get_current_function_mode() is self:
            pop_function_mode()

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

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, and record the call if the loop itself makes it and the module has parameters."""
        if not self._is_looking() or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        with self._carried(Exception), self.paused():
            self._on_call(module, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():  # torch.compile must find PyTorch's own functions, and no mode
                return call(module, *args, **kwargs)

        return self._write("module", self._root(module), run, args, kwargs) if self._is_seen() else run(*args, **kwargs)

    def call(self, kind: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of the loop, and record the call."""
        if not self._is_seen():
            return call(*args, **kwargs)
        return self._write(kind, call, call, args, kwargs)

    def call_backward(self, backward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a backward pass of the loop, and record it; it may find that a recomputation differs."""
        with self._carried(MemfitError):
            return self.call("backward", backward, args, kwargs)

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
        is_off = self._depth or self._is_over or self._is_paused
        return not is_off and threading.get_ident() == self._thread

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Record an update; where it calls a closure, after that has run."""
        if self._is_over or self._is_paused:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._depth += 1
        if closure is None:
            self._updated(optimizer)
            return None
        wrapped = functools.partial(self._closure, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        depth, self._depth = self._depth, 0
        try:
            return closure()
        finally:
            self._depth = depth
            self._updated(optimizer)

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        self.updates[id(optimizer)] = self.updates.get(id(optimizer), 0) + 1
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
        if self.is_writing:
            number = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
            self.entries.append(Entry("update", number, Arguments(((), {}), ()), ExecutionContext.now()))

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not (self._is_over or self._is_paused):
            self._depth -= 1

    # Recording

    def _write(self, kind: Any, what: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth += 1  # nested calls are no part of the loop
        try:
            entry = Entry(kind, what, self._arguments(args, kwargs), ExecutionContext.now())
            versions = [version_of(t) for t in self._tensors(args, kwargs)] if kind == "function" else []
            self.entries.append(entry)
            out = run(*args, **kwargs)
            outputs = leaves_of(out)
            entry.made = [self._make(tensor) for tensor in outputs]
            changed = kind == "function" and versions != [version_of(t) for t in self._tensors(args, kwargs)]
        finally:
            self._depth -= 1
        is_set = getattr(what, "__name__", "") == _SET
        if kind == "function" and not (outputs or changed or is_set):
            self._forget(entry)
        if len(self.entries) > MOST_ENTRIES:
            self.fault = self.fault or f"the step calls more than {MOST_ENTRIES:,} functions outside of its modules"
            self.is_writing = False
        return out

    def _tensors(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        return [t for t in leaves_of((args, kwargs)) if not t.is_inference()]

    def _forget(self, entry: Entry) -> None:
        """Remove an entry that did nothing to tensors; its drops move to the entry before."""
        position = next(i for i in range(len(self.entries) - 1, -1, -1) if self.entries[i] is entry)
        del self.entries[position]
        if position:
            self.entries[position - 1].drops += entry.drops

    def _arguments(self, args: Any, kwargs: Any) -> Arguments:
        references: list[Reference] = []

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            references.append(self._reference(tensor))
            return _STAND_IN

        # Copied, since the loop may change its lists and dicts later.
        own = tree_map(lambda leaf: leaf, (tuple(args), dict(kwargs)))
        template = map_tensors(stand_in, own)
        return Arguments(template, tuple(references))

    def _reference(self, tensor: torch.Tensor) -> Reference:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.requires_grad and not tensor.is_leaf:
            self.fault = self.fault or "a tensor was computed from parameters before the first module was called"
        self.given.append(tensor)
        return self._know(tensor, BatchTensor(len(self.given) - 1))

    def _make(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and isinstance(known[1], ResultTensor):
            return known[1].number
        self._made += 1
        self._know(tensor, ResultTensor(self._made))
        return self._made

    def _know(self, tensor: torch.Tensor, reference: Reference) -> Reference:
        died = functools.partial(self._died, reference) if isinstance(reference, ResultTensor) else None
        self._known[id(tensor)] = (weakref.ref(tensor, died), reference)
        return reference

    def _died(self, reference: ResultTensor, _: object) -> None:
        if self.is_writing and self.entries:
            self.entries[-1].drops.append(reference.number)

    def _root(self, module: nn.Module) -> int:
        for number, root in enumerate(self.roots):
            if root is module:
                return number
        number = len(self.roots)
        self.roots.append(module)
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            self._names.setdefault(id(tensor), ModuleTensor(number, name))
        return number


def _deep_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; `copy.deepcopy` would read memory, which fake tensors don't have."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Replacement:
    """Replacements of the PyTorch functions that run modules, backward passes and custom functions."""

    def __init__(self, watcher: Watcher) -> None:
        call_module, backward, grad = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
        apply = torch.autograd.Function.__dict__["apply"]

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return watcher.call_module(module, call_module, args, kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            return watcher.call_backward(backward, args, kwargs)

        def watched_grad(*args: Any, **kwargs: Any) -> Any:
            return watcher.call("function", grad, args, kwargs)

        def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return watcher.call("function", apply.__get__(None, cls), args, kwargs)

        self._places: list[tuple[Any, str, Any, Any]] = [
            (nn.Module, "__call__", call_module, watched_call),
            (torch.autograd, "backward", backward, watched_backward),
            (torch.autograd, "grad", grad, watched_grad),
            (torch.autograd.Function, "apply", apply, classmethod(watched_apply)),
        ]

    def put(self) -> None:
        for owner, name, _, watched in self._places:
            setattr(owner, name, watched)

    def take(self) -> None:
        for owner, name, own, _ in self._places:
            setattr(owner, name, own)

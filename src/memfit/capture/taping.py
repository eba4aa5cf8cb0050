"""A training loop, watched while it runs: its step is written to a tape.

PyTorch functions are seen by a function mode; calls of modules, backward passes and custom functions by replacing the
functions of PyTorch that all of them go through; updates by the hooks that optimizers have. Nothing that the loop
computes changes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, overrides
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memfit.batch import leaves_of, map_tensors
from memfit.tape import Arguments, Entry, Given, Held, Made, Reference, Surroundings, Tape, with_phases

MOST_ENTRIES = 100_000
_SET = "__set__"
_STAND_IN = torch.empty(0, device="meta")


class Watcher(TorchFunctionMode):
    """Watches a loop, and writes its step down between `begin` and `end`.

    Args:
        on_call: Told of each module that the loop itself calls, before it runs, with its arguments.

    Attributes:
        entries: What was seen.
        given: Tensors from outside the step that it used.
        roots: Modules that the loop called, in the order of their first calls.
        is_writing: Whether it writes down what it sees.
        fault: Why what was seen can't be run again; "" where it can.
        updates: How often each optimizer has stepped since `begin`, by its identity.
    """

    def __init__(self, on_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._on_call = on_call
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
        self._names: dict[int, Held] = {}

    def _forget_all(self) -> None:
        self.entries: list[Entry] = []
        self.given: list[torch.Tensor] = []
        self.updates: dict[int, int] = {}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Reference]] = {}
        self._made = 0

    def begin(self) -> None:
        """Begin to write."""
        self._reset()
        self.is_writing = True

    def count(self) -> None:
        """Let go of the entries; count the updates from now on, of the same modules and optimizers."""
        self.is_writing = False
        self._forget_all()

    def end(self) -> Tape:
        """Return the tape, and write no more."""
        self.is_writing = False
        entries, passes = with_phases(self.entries)
        names = [""] if len(self.roots) == 1 else [f"{i}_{type(root).__name__}" for i, root in enumerate(self.roots)]
        self._known.clear()
        return Tape(entries, tuple(names), passes)

    def stop(self) -> None:
        """Watch no more: what is left of the loop runs as if nothing had been there."""
        self.is_writing, self._is_over = False, True
        self._forget_all()
        self._stack.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See nothing of what runs in this context, which is no part of the loop."""
        self._is_paused = True
        self._replacement.take()
        on_top = overrides._get_current_function_mode() is self
        try:
            with overrides._pop_mode_temporarily() if on_top else contextlib.nullcontext():
                yield
        finally:
            self._is_paused = False
            if self._is_over:
                self._take_off()
            else:
                self._replacement.put()

    # What is seen

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs in this context."""
        for register, hook in (
            (optimizers.register_optimizer_step_pre_hook, self._before_update),
            (optimizers.register_optimizer_step_post_hook, self._after_update),
        ):
            self._stack.callback(register(hook).remove)
        self._replacement.put()
        self._stack.callback(self._replacement.take)
        overrides._push_mode(self)
        self._stack.callback(self._take_off)
        try:
            yield
        finally:
            self.stop()
            self._take_off()  # where another mode was in it when the watch ended

    def _take_off(self) -> None:
        """Take the function mode off, where it is the innermost; under another one it stays, and does nothing."""
        if overrides._get_current_function_mode() is self:
            overrides._pop_mode()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_seen() or func is torch.Tensor.backward:  # which `torch.autograd.backward` is called by
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self._write("function", torch.Tensor.unbind, torch.Tensor.unbind, args, kwargs))
        if func is torch.Tensor.__deepcopy__:  # whose memo is of one copy, and of no other
            run = functools.partial(func, memo=args[1] if len(args) > 1 else kwargs["memo"])
            return self._write("function", _deep_copied, run, args[:1], {})
        return self._write("function", func, func, args, kwargs)

    def call_module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, and write it down if it is the loop that calls it and it has parameters."""
        if not self._is_looking() or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        with self.paused():
            self._on_call(module, args, kwargs)
        if not self._is_seen():
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1
        run = functools.partial(call, module)
        return self._write("module", self._root(module), run, args, kwargs)

    def call(self, kind: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run something that the loop does, and write it down."""
        if not self._is_seen():
            return call(*args, **kwargs)
        return self._write(kind, call, call, args, kwargs)

    def _is_seen(self) -> bool:
        return self.is_writing and self._is_looking()

    def _is_looking(self) -> bool:
        away = self._depth or self._is_over or self._is_paused
        return not away and threading.get_ident() == self._thread

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Write an update down; where it calls a closure, once that has run."""
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
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)
        if self.is_writing:
            number = next(i for i, one in enumerate(self.optimizers) if one is optimizer)
            self.entries.append(Entry("update", number, Arguments(((), {}), ()), Surroundings.now()))

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not (self._is_over or self._is_paused):
            self._depth -= 1

    # What is written

    def _write(self, kind: Any, what: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth += 1  # what happens within is no part of the loop
        try:
            entry = Entry(kind, what, self._arguments(args, kwargs), Surroundings.now())
            versions = [t._version for t in self._tensors(args, kwargs)] if kind == "function" else []
            self.entries.append(entry)
            out = run(*args, **kwargs)
            made = leaves_of(out)
            entry.made = [self._make(tensor) for tensor in made]
            changed = kind == "function" and versions != [t._version for t in self._tensors(args, kwargs)]
        finally:
            self._depth -= 1
        is_set = getattr(what, "__name__", "") == _SET
        if kind == "function" and not (made or changed or is_set):
            self._forget(entry)
        if len(self.entries) > MOST_ENTRIES:
            self.fault = self.fault or f"the step does more than {MOST_ENTRIES:,} things between its modules"
            self.is_writing = False
        return out

    def _tensors(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        return [t for t in leaves_of((args, kwargs)) if not t.is_inference()]

    def _forget(self, entry: Entry) -> None:
        """Take an entry that did nothing to tensors off again; what was let go meanwhile goes after the one before."""
        position = next(i for i in range(len(self.entries) - 1, -1, -1) if self.entries[i] is entry)
        del self.entries[position]
        if position:
            self.entries[position - 1].drops += entry.drops

    def _arguments(self, args: Any, kwargs: Any) -> Arguments:
        references: list[Reference] = []

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            references.append(self._reference(tensor))
            return _STAND_IN

        own = tree_map(_same, (tuple(args), dict(kwargs)))  # the loop may change its lists and dicts later
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
        return self._know(tensor, Given(len(self.given) - 1))

    def _make(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and isinstance(known[1], Made):
            return known[1].number
        self._made += 1
        self._know(tensor, Made(self._made))
        return self._made

    def _know(self, tensor: torch.Tensor, reference: Reference) -> Reference:
        died = functools.partial(self._died, reference) if isinstance(reference, Made) else None
        self._known[id(tensor)] = (weakref.ref(tensor, died), reference)
        return reference

    def _died(self, reference: Made, _: object) -> None:
        if self.is_writing and self.entries:
            self.entries[-1].drops.append(reference.number)

    def _root(self, module: nn.Module) -> int:
        for number, root in enumerate(self.roots):
            if root is module:
                return number
        number = len(self.roots)
        self.roots.append(module)
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            self._names.setdefault(id(tensor), Held(number, name))
        return number


def _same(leaf: Any) -> Any:
    return leaf


def _deep_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as `copy.deepcopy` does, which reads the memory that fake tensors don't have."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Replacement:
    """Functions in the place of those of PyTorch that calls of modules, backward passes and so on go through."""

    def __init__(self, watcher: Watcher) -> None:
        call_module, backward, grad = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
        apply = torch.autograd.Function.__dict__["apply"]

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return watcher.call_module(module, call_module, args, kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            return watcher.call("backward", backward, args, kwargs)

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
        """Put them there."""
        for owner, name, _, watched in self._places:
            setattr(owner, name, watched)

    def take(self) -> None:
        """Put PyTorch's own back."""
        for owner, name, own, _ in self._places:
            setattr(owner, name, own)

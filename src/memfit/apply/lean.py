"""Lean normalisations and activations as a lever: what they make is made again in the backward pass, not kept.

A normalisation keeps its input for its own backward pass, and so do most activations; their output is kept once more by
what follows (a convolution, three projections). It is cheap to make again from that input. The rules:

1. While the model's forward pass runs, autograd saves through a `_Layer`. What it knows as the output of a lean module,
   unchanged since, becomes a `_Dropped`, which knows how to make it again; all else is kept as it would be.
2. A call of a lean module may be dropped where its tensor arguments are there anyway: saved by its own backward pass,
   or outputs of lean modules themselves, which chains a normalisation, a dropout and an activation. An argument that
   is not is held where what is dropped for it takes more bytes.
3. What a call saves inside is dropped too where it is large: a dropout's mask, the steps of a composite activation.
   Statistics are small, and kept.
4. When the backward pass asks for what was dropped, the call runs again, as it ran before: with its generators' states
   and autocast, on copies of running statistics. All that waits for it is filled, and let go of as it is taken.
5. A checkpointed region has a layer of its own, in its forward pass and whenever it runs again, whose hooks end in the
   region's: what is lean is not kept by its recomputation either. Its arguments are kept whole, so that no
   recomputation leads to another region's.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.apply.containers import Value, mapped, tensors_in
from memfit.apply.frame import Generators, autocast_state, graph_task, statistics_untouched
from memfit.apply.keep import Dropping, hooks_around
from memfit.errors import PlanError, PlanMismatchError, RecomputationError

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_DROPOUTS = nn.modules.dropout._DropoutNd
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.GLU),
)
_NAMES = ("Norm", "Activation")  # of the classes of other libraries, as transformers' LlamaRMSNorm and NewGELUActivation
_SMALL = 4  # what a call saves inside is kept where its output is this many times larger


def is_lean(module: nn.Module) -> bool:
    """Tell whether a module is a normalisation, activation or dropout that can be run again by itself."""
    if isinstance(module, (*_NORMS, *_ACTIVATIONS, _DROPOUTS)):
        return not isinstance(module, nn.SyncBatchNorm)  # which would wait for the other ranks again
    return type(module).__name__.endswith(_NAMES) and not module._modules


def lean_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that patterns name, by FQN.

    Args:
        model: The model.
        patterns: FQNs, in which * stands for anything.

    Raises:
        PlanMismatchError: A pattern names none.
    """
    able = {fqn: module for fqn, module in model.named_modules() if is_lean(module)}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        named = {fqn: able[fqn] for fqn in fnmatch.filter(able, pattern)}
        if not named:
            raise PlanMismatchError(
                f"the plan's levers.lean names {pattern!r}, which is no normalisation, activation or dropout of the"
                f" model: it has {len(able)} ({', '.join(list(able)[:3])}, …); '*' names all of them"
            )
        found |= named
    return found


@contextlib.contextmanager
def lean(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Have a model's normalisations and activations made again in the backward pass, until the context is left.

    Args:
        model: The model; hooks are put on its modules, and nothing else of it is touched.
        patterns: FQNs of the modules, in which * stands for anything. Empty for none.

    Raises:
        PlanMismatchError: A pattern names no module.
        PlanError: The model is lean already.
    """
    if patterns and is_made_lean(model):
        raise PlanError("Workload.model is made lean by a plan already: call close() on the earlier step first")
    modules = lean_modules(model, patterns)
    handles: list[Any] = []
    try:
        if modules:
            root = _Root()
            handles += [
                model.register_forward_pre_hook(root.enter),
                model.register_forward_hook(root.leave, always_call=True),
            ]
        for fqn, module in modules.items():
            handles += [
                module.register_forward_pre_hook(functools.partial(_begin, fqn), with_kwargs=True),
                module.register_forward_hook(_end, always_call=True),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_made_lean(model: nn.Module) -> bool:
    """Tell whether a model's modules are lean at present."""
    hooks = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return any(isinstance(owner, _Root) for owner in hooks)


def within_region(forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return the forward pass of a module that is checkpointed, with a layer of its own where the model is lean.

    Args:
        forward: Of the module.
        args: Of this call: they are kept whole from now on.
        kwargs: Likewise.
    """
    layer = _current()
    if layer is None:
        return forward
    for tensor in tensors_in((args, kwargs)):
        layer.outputs.pop(tensor.untyped_storage()._cdata, None)
    return functools.partial(_in_layer, layer, forward)


def _in_layer(around: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _LayerWithin() as layer:
        out = forward(*args, **kwargs)
        if around.is_open:  # not where it is recomputed: then what is around it has ended
            around.outputs |= layer.outputs
    return out


def _current() -> _Layer | None:
    """Return the layer that autograd saves through at present."""
    hooks = hooks_around()
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, _Layer) else None


class _Root:
    """Hooks of the model itself: a layer for each of its forward passes."""

    def __init__(self) -> None:
        self.layers: list[_Layer | None] = []

    def __deepcopy__(self, memo: Any) -> _Root:
        return _Root()

    def enter(self, module: nn.Module, args: Any) -> None:
        active = torch.is_grad_enabled() and not torch.compiler.is_compiling() and _current() is None
        self.layers.append(_Layer().__enter__() if active else None)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        layer = self.layers.pop() if self.layers else None
        if layer is not None:
            layer.__exit__(None, None, None)


def _begin(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook of a lean module, before its call."""
    layer = _current()
    if layer is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        layer.running.append(_Call(layer, fqn, module, args, kwargs))


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of a lean module, after its call."""
    layer = _current()
    if layer is not None and layer.running and layer.running[-1].module is module:
        layer.running.pop().finish(layer, output)


class _Layer:
    """Hooks of saved tensors that drop what lean modules make, and end in the hooks around them.

    Attributes:
        outputs: The call that made each storage, by the storage's address.
        running: The calls of lean modules that are running.
        is_open: Whether its forward pass is running.
    """

    def __init__(self) -> None:
        self.below = hooks_around() or (_noted, _unchanged)
        self.outputs: dict[int, _Call] = {}
        self.running: list[_Call] = []
        self.is_open = True

    def __enter__(self) -> _Layer:
        self._hooks = saved_tensors_hooks(self.pack, _unpacked)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Forget what was made: what autograd holds is all that is left."""
        self._hooks.__exit__(*error)
        self.is_open = False
        self.outputs.clear()
        self.running.clear()
        del self._hooks  # which hold the layer

    def call_of(self, tensor: torch.Tensor) -> _Call | None:
        """Return the call that made a tensor, if that is unchanged since."""
        call = self.outputs.get(_storage(tensor))
        return call if call is not None and (call.version, call.dtype) == (tensor._version, tensor.dtype) else None

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Return what autograd holds in place of a tensor; of what a lean module makes, that is decided at its end."""
        saved = _Saved(tensor.detach() if tensor.requires_grad else tensor)
        call = self.call_of(tensor)
        if call is not None:
            saved.drop(call)
        elif not self.running:
            saved.keep(self)
        if self.running:
            self.running[-1].saves.append(saved)
        return saved

    def kept(self, tensor: torch.Tensor) -> _Saved:
        """Return a tensor as the hooks around keep it."""
        saved = _Saved(tensor.detach())
        saved.keep(self)
        return saved


class _LayerWithin(_Layer, Dropping):
    """The layer of a region, whose hooks drop all that gets through."""


class _Saved:
    """What autograd holds in place of a tensor.

    Attributes:
        tensor: The tensor while it is not decided what becomes of it; later, made again for a backward pass.
        task: That backward pass.
        call: The call that makes it again; None where it is kept.
        place: Where it is in the output of that call (shape, strides, offset), or among what is saved inside (a number).
    """

    __slots__ = ("__weakref__", "call", "packed", "place", "task", "tensor", "unpack")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.task = 0
        self.call: _Call | None = None
        self.place: Any = None

    def keep(self, layer: _Layer) -> None:
        """Give the tensor to the hooks around a layer."""
        pack, self.unpack = layer.below
        self.packed, self.tensor = pack(self.tensor), None

    def drop(self, call: _Call, number: int | None = None) -> None:
        """Have the tensor made again by a call: as its output, or as the tensor saved inside of a number."""
        assert self.tensor is not None
        strides = self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        self.call, self.place, self.tensor = call, strides if number is None else number, None
        call.waiting.append(weakref.ref(self))

    def fill(self, task: int, output: torch.Tensor, inside: Mapping[int, torch.Tensor]) -> None:
        """Hold what was made again until the backward pass takes it, which it does once."""
        if task != self.task:
            is_inside = isinstance(self.place, int)
            self.task, self.tensor = task, inside[self.place] if is_inside else output.as_strided(*self.place)

    def take(self) -> torch.Tensor:
        """Return the tensor."""
        if self.call is None:
            kept: torch.Tensor = self.unpack(self.packed)
            return kept
        task = graph_task()
        if self.task != task or self.tensor is None:
            self.task = 0
            self.call.run(task, self)
        made, self.tensor = self.tensor, None
        assert made is not None
        return made


class _Call:
    """One call of a lean module.

    Attributes:
        module: The module.
        saves: What autograd saves in it, in order.
        waiting: What it makes again.
        version: Of its output, as it came out.
        dtype: Of its output.
    """

    def __init__(self, layer: _Layer, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.fqn, self.module = fqn, module
        self.saves: list[_Saved] = []
        self.waiting: list[weakref.ref[_Saved]] = []
        self._tensors: list[torch.Tensor] = []
        self._given = mapped((args, kwargs), torch.Tensor, self._number)
        self._versions = [tensor._version for tensor in self._tensors]
        self._arguments: list[_Call | _Saved | None] = [layer.call_of(tensor) for tensor in self._tensors]
        self._needs_gradient = [tensor.requires_grad for tensor in self._tensors]
        draws = isinstance(module, _DROPOUTS) and module.training
        self._generators = Generators.of(self._tensors) if draws else None
        self._autocast = autocast_state()

    def _number(self, tensor: torch.Tensor) -> Value:
        self._tensors.append(tensor)
        return Value(len(self._tensors) - 1)

    def finish(self, layer: _Layer, output: Any) -> None:
        """Decide what becomes of what was saved, and where that pays, have the output known as this call's."""
        dropped = self._droppable(output) if self._can_run_again(output) else None
        for number, saved in enumerate(self.saves):
            if saved.tensor is not None and dropped is not None and number in dropped:
                saved.drop(self, None if _storage(saved.tensor) == _storage(output) else number)
            elif saved.tensor is not None:
                saved.keep(layer)
        if dropped is not None:
            self._arguments = [
                made or layer.kept(tensor) for made, tensor in zip(self._arguments, self._tensors, strict=True)
            ]
            self.version, self.dtype = output._version, output.dtype
            self._made = _looks(output), len(self.saves)
            self._address = StorageWeakRef(output.untyped_storage())  # no other storage gets it meanwhile
            layer.outputs[_storage(output)] = self
        self.saves, self._tensors = [], []

    def _can_run_again(self, output: Any) -> bool:
        """Tell whether the call made a new tensor of arguments that are as they were, or are made again."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not _storage(output):
            return False
        for tensor, version, made in zip(self._tensors, self._versions, self._arguments, strict=True):
            is_changed = tensor._version != version
            if not _storage(tensor) or (is_changed and made is None):
                return False
            if _storage(tensor) == _storage(output) and not is_changed:
                return False
        return True

    def _droppable(self, output: torch.Tensor) -> set[int] | None:
        """Return the numbers of what was saved and need not be kept; None where keeping the arguments costs more."""
        given = list(zip(self._tensors, self._versions, self._arguments, strict=True))
        arguments = {(_storage(tensor), version) for tensor, version, _ in given}
        there = {_storage(tensor) for tensor, _, made in given if made is not None or tensor.is_leaf}
        own = {_storage(t) for of in (self.module._parameters, self.module._buffers) for t in of.values() if t is not None}
        large = _bytes(output) / _SMALL
        gains: dict[int, int] = {}
        dropped = set()
        for number, saved in enumerate(self.saves):
            if saved.tensor is None:
                continue
            key = _storage(saved.tensor)
            if (key, saved.tensor._version) in arguments:
                there.add(key)
            elif key and key not in own and _bytes(saved.tensor) >= large:
                dropped.add(number)
                gains[key] = _bytes(saved.tensor)
        cost = sum({_storage(t): _bytes(t) for t in self._tensors if _storage(t) not in there}.values())
        return dropped if cost == 0 or cost < sum(gains.values()) else None

    def run(self, task: int, asked: _Saved | None = None) -> torch.Tensor:
        """Run again, fill what waits for it in a backward pass, and return the output.

        Raises:
            RecomputationError: It does something else this time.
        """
        output, inside, count = self._run_again(task)
        if (_looks(output), count) != self._made:
            how = f"it makes {_looks(output)} and saves {count} tensors, and made {self._made[0]} with {self._made[1]}"
            raise RecomputationError((self.fqn,), self.fqn, how)
        for saved in (reference() for reference in self.waiting):
            if saved is not None and (task >= 0 or saved is asked):  # outside of a backward pass, no other takes it
                saved.fill(task, output, inside)
        return output

    def output(self, task: int) -> torch.Tensor:
        """Return the output, from what waits for it where it is there already."""
        for saved in (reference() for reference in self.waiting):
            if saved is not None and saved.task == task and saved.tensor is not None and not isinstance(saved.place, int):
                return saved.tensor.as_strided(*self._made[0][1:])
        return self.run(task)

    def _run_again(self, task: int) -> tuple[torch.Tensor, dict[int, torch.Tensor], int]:
        """Run again; return the output, what is saved inside and waited for, and how much is saved."""
        waiting = [saved.place for saved in (reference() for reference in self.waiting) if saved is not None]
        inside: dict[int, torch.Tensor] = {}
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count in waiting:
                inside[count] = tensor.detach()
            count += 1

        args, kwargs = self._values(task)
        with saved_tensors_hooks(pack, _never), torch.enable_grad(), self._as_before():
            output = self.module(*args, **kwargs)
        return output.detach(), inside, count

    def _values(self, task: int) -> Any:
        """Return the arguments."""
        values = [
            (made.output(task) if isinstance(made, _Call) else made.take()).detach().requires_grad_(needs)
            for made, needs in zip(self._arguments, self._needs_gradient, strict=True)
            if made is not None
        ]
        return mapped(self._given, Value, lambda value: values[value.number])

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set back what the call depends on besides its arguments, until the context is left."""
        is_inplace = getattr(self.module, "inplace", False)
        with contextlib.ExitStack() as stack:
            for device, (enabled, dtype, cache) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            if isinstance(self.module, nn.modules.batchnorm._NormBase):
                stack.enter_context(statistics_untouched([self.module]))
            if self._generators is not None:
                stack.enter_context(self._generators.again())
            if is_inplace:  # the argument is of a graph of its own, and may be waited for
                self.module.inplace = False
                stack.callback(setattr, self.module, "inplace", True)
            yield


def _looks(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _unpacked(saved: _Saved) -> torch.Tensor:
    return saved.take()


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("what is made again is not differentiated")


def _noted(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, tensor._version


def _unchanged(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that was kept, as autograd does without hooks: unless it changed."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor

"""Lean normalisations and activations as a lever: their outputs are recomputed in the backward pass, not saved.

A normalisation saves its input for its own backward pass, and so do most activations; the operators that follow (a
convolution, three projections) save the output too, which is cheap to recompute from that input.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memfit._torch import (
    DropoutBase,
    NormBase,
    forward_pre_hooks,
    own_buffers,
    own_modules,
    own_parameters,
    storage_key_of,
    version_of,
)
from memfit.errors import PlanError, PlanMismatchError, RecomputationError
from memfit.recomputation import probe
from memfit.recomputation.call_state import (
    CallState,
    Placeholder,
    foreign_generators,
    mapped,
    running_again,
    tensors_in,
)
from memfit.recomputation.frame import graph_task
from memfit.recomputation.kept_outputs import are_dropped, hooks_around, owner_of_hooks
from memfit.workload import attribute_generators

_NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
)
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Hooks of saved tensors: pack and unpack."""

_SMALL = 4  # a tensor that a call saves inside is kept where the output is this many times larger
_NAMES = ("Norm", "Activation")  # suffixes of other libraries' classes: LlamaRMSNorm, NewGELUActivation


def is_lean(module: nn.Module) -> bool:
    """Tell whether a module is a normalisation, activation or dropout that can be recomputed by itself."""
    if isinstance(module, (*_NORMS, *_ACTIVATIONS, DropoutBase)):
        return not isinstance(module, nn.SyncBatchNorm)  # it would wait for the other ranks again
    return type(module).__name__.endswith(_NAMES) and not own_modules(module)


@contextlib.contextmanager
def lean(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Recompute the outputs of modules that patterns name in the backward pass, by hooks, until the context is left.

    In a pattern, * stands for anything.

    Raises:
        PlanMismatchError: A pattern names no module.
        PlanError: The model is lean already.
    """
    if patterns and is_made_lean(model):
        raise PlanError("Workload.model is made lean by a plan already: call close() on the earlier step first")
    candidates = {fqn: module for fqn, module in model.named_modules() if is_lean(module)}
    modules: dict[str, nn.Module] = {}
    for pattern in patterns:
        named = {fqn: candidates[fqn] for fqn in fnmatch.filter(candidates, pattern)}
        if not named:
            raise PlanMismatchError(
                f"the plan's levers.lean has {pattern!r}, and that is no normalisation, activation or dropout of the"
                f" model: the model has {len(candidates)} ({', '.join(list(candidates)[:3])}, …); '*' names all of them"
            )
        modules |= named
    root = _Root()
    with contextlib.ExitStack() as stack:
        stack.callback(root.leave)
        if modules:
            stack.callback(model.register_forward_pre_hook(root.enter).remove)
            stack.callback(model.register_forward_hook(root.leave, always_call=True).remove)
        for fqn, module in modules.items():
            begin = functools.partial(_begin, fqn)
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(_end, always_call=True).remove)
        yield


def is_made_lean(model: nn.Module) -> bool:
    """Tell whether `lean` is active on a model."""
    owners = (getattr(hook, "__self__", None) for hook in forward_pre_hooks(model).values())
    return any(isinstance(owner, _Root) for owner in owners)


def within_region(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return the forward pass of a checkpointed module, with a layer of its own where the model is lean.

    The layer's hooks end in the region's: its recomputation saves no lean output either. The call's arguments are saved
    from now on. A module that is lean itself is recomputed by its region.
    """
    layer = _current()
    if layer is None:
        return forward
    for tensor in tensors_in((args, kwargs)):  # saved, so that no recomputation leads to another region's
        layer.outputs.pop(storage_of(tensor), None)
    if layer.running and layer.running[-1].module is module:
        layer.running.pop()

    def in_layer(*args: Any, **kwargs: Any) -> Any:
        with _Layer() as inner:
            out = forward(*args, **kwargs)
            if layer.is_open:  # not in a recomputation, after the end of the layer around
                layer.outputs |= inner.outputs
        return out

    return in_layer


def _current() -> _Layer | None:
    """Return the layer that autograd saves through at present; None in compiled code, which is left alone."""
    if torch.compiler.is_compiling():
        return None
    owner = owner_of_hooks()
    return owner if isinstance(owner, _Layer) else None


class _Root:
    """Hooks of the model itself, which open a layer for each forward pass. A deep copy has none open."""

    def __init__(self) -> None:
        self.layer: _Layer | None = None

    def __deepcopy__(self, memo: Any) -> _Root:
        return _Root()

    def enter(self, module: nn.Module, args: Any) -> None:
        self.leave()  # a forward pass that was interrupted from the keyboard did not close its layer
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _current() is None:
            self.layer = _Layer().__enter__()

    def leave(self, *_: Any) -> None:
        layer, self.layer = self.layer, None
        if layer is not None:
            layer.__exit__(None, None, None)


def _begin(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    layer = _current()
    if layer is not None and torch.is_grad_enabled():
        layer.running.append(LeanCall(fqn, module, (args, kwargs), layer.call_of))


def _end(module: nn.Module, args: Any, output: Any) -> None:
    layer = _current()
    if layer is not None and layer.running and layer.running[-1].module is module:
        call = layer.running.pop()
        if call.finish(output, layer.below):
            layer.outputs[storage_of(output)] = call


class _Layer:
    """Hooks of saved tensors that drop unchanged outputs of lean modules, and pass others to the hooks around them."""

    def __init__(self) -> None:
        self.drops_saved_tensors = are_dropped()  # as the layer of a region, whose hooks drop all tensors
        self.below: Hooks = hooks_around() or (lambda tensor: (tensor, version_of(tensor)), _unpack_unchanged)
        self.outputs: dict[int, LeanCall] = {}  # by the key of the storage that they made
        self.running: list[LeanCall] = []
        self.is_open = True  # its forward pass is running

    def __enter__(self) -> _Layer:
        self._hooks = saved_tensors_hooks(self.pack, SavedTensor.take)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the layer: only autograd holds saved tensors from now on."""
        self._hooks.__exit__(*error)
        self.is_open = False
        self.outputs.clear()
        self.running.clear()
        del self._hooks  # they hold the layer

    def call_of(self, tensor: torch.Tensor) -> LeanCall | None:
        """Return the call that made a tensor, if the tensor is unchanged since."""
        call = self.outputs.get(storage_of(tensor))
        return call if call is not None and (call.version, call.dtype) == (version_of(tensor), tensor.dtype) else None

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Return the object that autograd holds for a tensor; `Call.finish` decides on one saved within a lean call."""
        saved = SavedTensor(tensor.detach() if tensor.requires_grad else tensor)
        call = self.call_of(tensor)
        if call is not None:
            saved.drop(call)
        elif not self.running:
            saved.keep(self.below)
        if self.running:
            self.running[-1].saves.append(saved)
        return saved


def _unpack_unchanged(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor, or raise autograd's error where it changed."""
    tensor, version = packed
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {list(tensor.shape)} is at version {version_of(tensor)}; expected version {version}"
        )
    return tensor


class SavedTensor:
    """The object that autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "call", "expected", "packed", "place", "task", "tensor", "unpack")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is kept or dropped; later, the recomputed one
        self.task: int | None = None  # the backward pass that it was recomputed for
        self.packed: Any = None
        self.unpack: Callable[[Any], torch.Tensor] = _not_unpacked
        self.call: LeanCall | None = None  # that recomputes it; None where it is kept
        self.place: Any = None  # in the call's output (shape, strides, offset), or its number among those saved inside
        self.expected: probe.Expected | None = None

    def keep(self, hooks: Hooks) -> SavedTensor:
        """Keep the tensor, by hooks of saved tensors."""
        assert self.tensor is not None
        pack, self.unpack = hooks
        self.packed, self.tensor = pack(self.tensor), None
        return self

    def drop(self, call: LeanCall, number: int | None = None) -> None:
        """Drop the tensor, to be recomputed by a call: as its output, or as the numbered tensor saved inside."""
        assert self.tensor is not None
        strides = self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        self.call, self.place = call, strides if number is None else number
        self.expected, self.tensor = probe.expected(self.tensor), None
        call.waiting.append(weakref.ref(self))

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


class LeanCall:
    """One call of a lean module; when it returned, its output had this `version` and `dtype`."""

    def __init__(
        self, fqn: str, module: nn.Module, given: Any, call_of: Callable[[torch.Tensor], LeanCall | None]
    ) -> None:
        self.fqn, self.module = fqn, module
        self.saves: list[SavedTensor] = []  # in order
        self.waiting: list[weakref.ref[SavedTensor]] = []  # those dropped, which it recomputes
        self._tensors: list[torch.Tensor] = []
        self._given = mapped(given, torch.Tensor, self._number)
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._arguments: list[LeanCall | SavedTensor | None] = [call_of(tensor) for tensor in self._tensors]
        self._needs_gradient = [tensor.requires_grad for tensor in self._tensors]
        self._drops = isinstance(module, DropoutBase) and module.training
        is_foreign = not type(module).__module__.startswith("torch.")  # it may draw from anything
        foreign = foreign_generators(attribute_generators(module)) if is_foreign else ()
        self._state = CallState((module,), self._tensors, foreign, self._drops or is_foreign)

    def _number(self, tensor: torch.Tensor) -> Placeholder:
        self._tensors.append(tensor)
        return Placeholder(len(self._tensors) - 1)

    def finish(self, output: Any, hooks: Hooks) -> bool:
        """Keep or drop the tensors saved in the call; tell whether its output is dropped where it is saved."""
        self._state.end()
        if not self._drops:
            self._state.forget_undrawn()
        dropped = self._droppable(output)
        for number, saved in enumerate(self.saves):
            if saved.tensor is not None and dropped is not None and number in dropped:
                saved.drop(self, None if storage_of(saved.tensor) == storage_of(output) else number)
            elif saved.tensor is not None:
                saved.keep(hooks)
        if dropped is not None:
            self._arguments = [
                origin or SavedTensor(tensor.detach()).keep(hooks)
                for origin, tensor in zip(self._arguments, self._tensors, strict=True)
            ]
            self.version, self.dtype = version_of(output), output.dtype
            self._made = _geometry(output), len(self.saves)
            self._address = StorageWeakRef(output.untyped_storage())  # no other storage gets this address meanwhile
        self.saves, self._tensors = [], []
        return dropped is not None

    def _droppable(self, output: Any) -> set[int] | None:
        """Return the numbers of the saved tensors to drop.

        None where the call made no new tensor from arguments that are unchanged or can be recomputed, and where keeping
        the arguments costs more.
        """
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not storage_of(output):
            return None
        given = list(zip(self._tensors, self._versions, self._arguments, strict=True))
        for tensor, version, origin in given:
            is_changed, is_output = version_of(tensor) != version, storage_of(tensor) == storage_of(output)
            if not storage_of(tensor) or (is_changed and origin is None) or (is_output and not is_changed):
                return None
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
                if saved.task != task:  # it waits until the backward pass takes it, once
                    is_inside = isinstance(saved.place, int)
                    saved.task, saved.tensor = (
                        task,
                        inside[saved.place] if is_inside else output.as_strided(*saved.place),
                    )
                if saved.expected is None or saved.tensor is None:
                    continue
                differs = saved.expected.difference(saved.tensor)
                if saved.expected.original is not None:  # a probe goes on with it
                    saved.tensor = saved.expected.original
                if differs is not None:
                    probe.report(RecomputationError((self.fqn,), self.fqn, differs), output.device)
        return output

    def output(self, task: int) -> torch.Tensor:
        """Return the output, from a dropped tensor that is filled already or by recomputation."""
        for saved in self._waiting():
            if saved.task == task and saved.tensor is not None and not isinstance(saved.place, int):
                return saved.tensor.as_strided(*self._made[0][1:])
        return self.run(task)

    def _waiting(self) -> list[SavedTensor]:
        return [saved for saved in (reference() for reference in self.waiting) if saved is not None]

    def _values(self, task: int) -> Any:
        values = [
            (origin.output(task) if isinstance(origin, LeanCall) else origin.take()).detach().requires_grad_(needs)
            for origin, needs in zip(self._arguments, self._needs_gradient, strict=True)
            if origin is not None
        ]
        return mapped(self._given, Placeholder, lambda value: values[value.number])

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
        normalisations = (self.module,) if isinstance(self.module, NormBase) else ()
        with (
            saved_tensors_hooks(pack, _not_unpacked),
            torch.enable_grad(),
            running_again((self._state,), (self.module,), normalisations),
            contextlib.ExitStack() as stack,
        ):
            self._state.restore()
            if getattr(self.module, "inplace", False):  # the argument may be a dropped tensor
                self.module.__dict__["inplace"] = False
                stack.callback(self.module.__dict__.update, inplace=True)
            output = self.module(*args, **kwargs)
        return output.detach(), inside, count


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage; 0 where it has none."""
    return storage_key_of(tensor) if tensor.layout is torch.strided else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _not_unpacked(packed: object) -> torch.Tensor:
    raise AssertionError("a recomputed graph is not differentiated")

"""Lean normalisations and activations as a lever: what they make is made again in the backward pass, not kept.

A normalisation keeps its input for its own backward pass, and so do most activations; their output is kept once more by
what follows (a convolution, three projections). It is cheap to make again from that input. The rules:

1. While the model's forward pass runs, autograd saves through a `_Layer`. What it knows as the output of a lean module,
   unchanged since, becomes a `Saved` that asks the call to run again; all else is kept as it would be.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.apply.again import Call, Hooks, Saved, storage_of
from memfit.apply.containers import tensors_in
from memfit.apply.keep import Dropping, hooks_around
from memfit.errors import PlanError, PlanMismatchError

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_DROPOUTS = nn.modules.dropout._DropoutNd
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
)
_NAMES = ("Norm", "Activation")  # of other libraries' classes, as transformers' LlamaRMSNorm and NewGELUActivation


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
    root = _Root()
    handles: list[Any] = []
    try:
        if modules:
            handles.append(model.register_forward_pre_hook(root.enter))
            handles.append(model.register_forward_hook(root.leave, always_call=True))
        for fqn, module in modules.items():
            handles.append(module.register_forward_pre_hook(functools.partial(_begin, fqn), with_kwargs=True))
            handles.append(module.register_forward_hook(_end, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        root.leave()


def is_made_lean(model: nn.Module) -> bool:
    """Tell whether a model's modules are lean at present."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return any(isinstance(owner, _Root) for owner in owners)


def within_region(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """Return the forward pass of a module that is checkpointed, with a layer of its own where the model is lean.

    Args:
        module: The module; where it is lean itself, that is left to its region.
        forward: Its forward pass.
        args: Of this call: they are kept whole from now on.
        kwargs: Likewise.
    """
    layer = _current()
    if layer is None:
        return forward
    for tensor in tensors_in((args, kwargs)):
        layer.outputs.pop(storage_of(tensor), None)
    if layer.running and layer.running[-1].module is module:
        layer.running.pop()
    return functools.partial(_in_layer, layer, forward)


def _in_layer(around: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _layer() as layer:
        out = forward(*args, **kwargs)
        if around.is_open:  # not where it is recomputed: then what is around it has ended
            around.outputs |= layer.outputs
    return out


def _current() -> _Layer | None:
    """Return the layer that autograd saves through at present; none in code that is compiled, which is left alone."""
    if torch.compiler.is_compiling():
        return None
    hooks = hooks_around()
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, _Layer) else None


class _Root:
    """Hooks of the model itself: a layer for each of its forward passes. Copies with none open (`copy.deepcopy`)."""

    def __init__(self) -> None:
        self.layer: _Layer | None = None

    def __deepcopy__(self, memo: Any) -> _Root:
        return _Root()

    def enter(self, module: nn.Module, args: Any) -> None:
        self.leave()  # a forward pass that was interrupted from the keyboard did not
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _current() is None:
            self.layer = _layer().__enter__()

    def leave(self, *_: Any) -> None:
        layer, self.layer = self.layer, None
        if layer is not None:
            layer.__exit__(None, None, None)


def _begin(fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook of a lean module, before its call."""
    layer = _current()
    if layer is not None and torch.is_grad_enabled():
        layer.running.append(Call(fqn, module, (args, kwargs), layer.call_of))


def _end(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of a lean module, after its call."""
    layer = _current()
    if layer is not None and layer.running and layer.running[-1].module is module:
        call = layer.running.pop()
        if call.finish(output, layer.below):
            layer.outputs[storage_of(output)] = call


class _Layer:
    """Hooks of saved tensors that drop what lean modules make, and end in the hooks around them.

    Attributes:
        outputs: The call that made each storage, by the storage's address.
        running: The calls of lean modules that are running.
        is_open: Whether its forward pass is running.
    """

    def __init__(self) -> None:
        self.below: Hooks = hooks_around() or (_noted, _unchanged)
        self.outputs: dict[int, Call] = {}
        self.running: list[Call] = []
        self.is_open = True

    def __enter__(self) -> _Layer:
        self._hooks = saved_tensors_hooks(self.pack, Saved.take)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Forget what was made: what autograd holds is all that is left."""
        self._hooks.__exit__(*error)
        self.is_open = False
        self.outputs.clear()
        self.running.clear()
        del self._hooks  # which hold the layer

    def call_of(self, tensor: torch.Tensor) -> Call | None:
        """Return the call that made a tensor, if that is unchanged since."""
        call = self.outputs.get(storage_of(tensor))
        return call if call is not None and (call.version, call.dtype) == (tensor._version, tensor.dtype) else None

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Return what autograd holds in place of a tensor; of what a lean module makes, that is decided at its end."""
        saved = Saved(tensor.detach() if tensor.requires_grad else tensor)
        call = self.call_of(tensor)
        if call is not None:
            saved.drop(call)
        elif not self.running:
            saved.keep(self.below)
        if self.running:
            self.running[-1].saves.append(saved)
        return saved


class _LayerWithin(_Layer, Dropping):
    """The layer of a region, whose hooks drop all that gets through."""


def _layer() -> _Layer:
    hooks = hooks_around()
    is_within = hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Dropping)
    return _LayerWithin() if is_within else _Layer()


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

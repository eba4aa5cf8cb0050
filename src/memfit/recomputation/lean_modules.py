"""Lean normalisations and activations as a lever: their outputs are recomputed in the backward pass, not saved.

A normalisation saves its input for its own backward pass, and so do most activations; the operators that follow (a
convolution, three projections) save the output too, which is cheap to recompute from that input.
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

from memfit._torch import DropoutBase, NormBase, forward_pre_hooks, own_modules, version_of
from memfit.errors import PlanError, PlanMismatchError
from memfit.recomputation.containers import tensors_in
from memfit.recomputation.kept_outputs import DroppingHooks, hooks_around, owner_of_hooks
from memfit.recomputation.module_calls import Hooks, LeanCall, SavedTensor, storage_of

_NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
)
_NAMES = ("Norm", "Activation")  # suffixes of other libraries' classes: LlamaRMSNorm, NewGELUActivation


def is_lean(module: nn.Module) -> bool:
    """Tell whether a module is a normalisation, activation or dropout that can be recomputed by itself."""
    if isinstance(module, (*_NORMS, *_ACTIVATIONS, DropoutBase)):
        return not isinstance(module, nn.SyncBatchNorm)  # it would wait for the other ranks again
    return type(module).__name__.endswith(_NAMES) and not own_modules(module)


def lean_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that patterns name, in which * stands for anything, by FQN.

    Raises:
        PlanMismatchError: A pattern names no module.
    """
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
    return modules


@contextlib.contextmanager
def lean(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Recompute the outputs of modules that patterns name in the backward pass, by hooks, until the context is left.

    Raises:
        PlanMismatchError: A pattern names no module.
        PlanError: The model is lean already.
    """
    if patterns and is_made_lean(model):
        raise PlanError("Workload.model is made lean by a plan already: call close() on the earlier step first")
    modules = lean_modules(model, patterns)
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
    return functools.partial(_in_layer, layer, forward)


def _in_layer(around: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _layer() as layer:
        out = forward(*args, **kwargs)
        if around.is_open:  # not in a recomputation, after the end of the layer around
            around.outputs |= layer.outputs
    return out


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
            self.layer = _layer().__enter__()

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
    """Hooks of saved tensors that drop unchanged outputs of lean modules, and pass others to the hooks around them.

    Attributes:
        outputs: The calls that made storages, by storage key.
        running: The running calls of lean modules.
        is_open: Whether the layer's forward pass is running.
    """

    def __init__(self) -> None:
        self.below: Hooks = hooks_around() or (_pack_with_version, _unpack_unchanged)
        self.outputs: dict[int, LeanCall] = {}
        self.running: list[LeanCall] = []
        self.is_open = True

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


class _LayerWithin(_Layer, DroppingHooks):
    """The layer of a region, whose hooks drop all tensors."""


def _layer() -> _Layer:
    return _LayerWithin() if isinstance(owner_of_hooks(), DroppingHooks) else _Layer()


def _pack_with_version(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, version_of(tensor)


def _unpack_unchanged(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor, or raise autograd's error where it changed."""
    tensor, version = packed
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            f" of shape {list(tensor.shape)} is at version {version_of(tensor)}; expected version {version}"
        )
    return tensor

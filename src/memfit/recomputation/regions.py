"""Activation checkpointing as a lever: regions whose forward pass runs again in the backward pass.

A region is a module, or a run of modules that their parent calls one after the other. `module.forward` is wrapped on
the instance, so that names, hooks and state dicts stay as they are; `recomputation.frame` does the rest. A compiled
module stays compiled, and its compiled code runs again; a region within compiled code is not recomputed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit._torch import NormBase, compiled_call, disable_dynamo, own_modules
from memfit.errors import PlanError, PlanMismatchError
from memfit.ir import Region, enclosing
from memfit.recomputation.call_state import ForeignGenerator, foreign_generators, tensors_in
from memfit.recomputation.frame import Frame
from memfit.recomputation.kept_outputs import InnerForward, KeptOccurrences, KeptOutputs
from memfit.recomputation.lean_modules import within_region
from memfit.workload import Reader, generators_of, has_history


@contextlib.contextmanager
def checkpointed(model: nn.Module, regions: Sequence[Region]) -> Iterator[None]:
    """Checkpoint regions of a model, until the context is left.

    The modules of a run share one pass as long as each is called after those before it in the run; another call
    begins a new pass, so that the gradients are right whatever the parent does. Regions may lie in one another.

    Raises:
        PlanMismatchError: The model has no module of a region's name.
        PlanError: A module is checkpointed already, or is in two regions, or lies within a region that keeps outputs.
    """
    modules = dict(model.named_modules())
    _check(modules, regions)
    places = {fqn: _place(modules[fqn]) for region in regions for fqn in region.modules}
    before = {fqn: modules[fqn].__dict__.get(place) for fqn, place in places.items()}
    inner = _inner_forwards(modules, regions)
    hooks: list[Any] = []
    reader = Reader()
    try:
        for fqn, forward in inner.items():
            modules[fqn].__dict__["forward"] = forward
        # A run of modules wraps around the regions of each of its modules.
        for region in sorted(regions, key=lambda region: len(region.modules)):
            passes = _Passes(region, [modules[fqn] for fqn in region.modules], reader)
            for position, fqn in enumerate(region.modules):
                within = modules[fqn].__dict__.get(places[fqn])
                setattr(modules[fqn], places[fqn], _Recomputed(modules[fqn], within, passes, position))
            if region.offload and region.prefetch:
                hooks.append(modules[region.prefetch].register_forward_hook(_Prefetch(passes)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for fqn in inner:
            modules[fqn].__dict__.pop("forward", None)
        for fqn, forward in before.items():
            modules[fqn].__dict__.pop(places[fqn], None)
            if forward is not None:
                setattr(modules[fqn], places[fqn], forward)


def is_checkpointed(model: nn.Module) -> bool:
    """Tell whether `checkpointed` is active on a model."""
    return any(_is_recomputed(module) for module in model.modules())


def _place(module: nn.Module) -> str:
    """Return the attribute that a module's call runs: `forward`, or the one that `module.compile()` sets."""
    return "forward" if compiled_call(module) is None else "_compiled_call_impl"


def _inner_forwards(modules: Mapping[str, nn.Module], regions: Sequence[Region]) -> dict[str, InnerForward]:
    """Return what takes the place of `forward` of the modules in regions that keep outputs.

    A module that has a `forward` of its own, or that may be compiled, counts as a part of the module around it.
    """
    keeping = {fqn for region in regions if region.keep for fqn in region.modules}
    left = {fqn for fqn, m in modules.items() if compiled_call(m) is not None or "_orig_mod" in own_modules(m)}
    return {
        fqn: InnerForward(fqn, module)
        for fqn, module in modules.items()
        if not keeping.isdisjoint(enclosing(fqn))
        and fqn not in keeping
        and left.isdisjoint(enclosing(fqn))
        and not isinstance(module, torch.jit.ScriptModule)
        and "forward" not in module.__dict__
    }


def _is_recomputed(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(_place(module)), _Recomputed)


def _check(modules: Mapping[str, nn.Module], regions: Sequence[Region]) -> None:
    active = [fqn for fqn, module in modules.items() if _is_recomputed(module)]
    named = [(fqn, region) for region in regions for fqn in region.modules]
    for fqn, _ in named:
        if fqn not in modules:
            raise PlanMismatchError(
                f"the plan checkpoints the module {fqn!r}, and the model has no such module: the plan is for another"
                " model"
            )
        earlier = next((name for name in active if name in enclosing(fqn) or fqn in enclosing(name)), None)
        if earlier is not None:
            raise PlanError(f"{earlier!r} is checkpointed by a plan already: call close() on the earlier step first")
    for region in regions:
        if region.prefetch and region.prefetch not in modules:
            raise PlanMismatchError(
                f"the region {region.modules} has prefetch={region.prefetch!r}, and the model has no such module: the"
                " plan is for another model"
            )
        if region.prefetch and not region.offload:
            raise PlanError(
                f"the region {region.modules} has prefetch={region.prefetch!r} with offload=False: set both"
            )
    for (inner, region), (outer, around) in itertools.permutations(named, 2):
        if outer not in enclosing(inner):
            continue
        is_within_run = inner == outer and len(region.modules) < len(around.modules)
        if region is not around and region.offload and (inner != outer or is_within_run):
            raise PlanError(
                f"the plan checkpoints {inner!r} within {outer!r}, and offloads {inner!r}: a region within another one"
                " keeps nothing in host memory. Set its offload to False, or remove one of the two from levers.regions"
            )
        if inner == outer and len(region.modules) == len(around.modules):
            raise PlanError(f"the plan checkpoints {inner!r} twice: remove it from one region of levers.regions")
        if region is around:
            raise PlanError(
                f"the plan checkpoints {inner!r} and {outer!r} around it as modules of one run, but a run's modules"
                " are called one after the other: remove one of the two"
            )
        if around.keep and not (inner == outer and len(region.modules) > len(around.modules)):
            raise PlanError(
                f"the plan checkpoints {inner!r} within {outer!r}, and the outer region keeps outputs (keep): set its"
                " keep to (), or remove one of the two from levers.regions"
            )


class _Passes:
    """The passes through a region. A deep copy of its modules has a copy with no pass open."""

    def __init__(self, region: Region, modules: Sequence[nn.Module], reader: Reader) -> None:
        self.modules = region.modules
        self.occurrences = KeptOccurrences(region.keep) if region.keep else None
        inside = {id(m): m for module in modules for m in module.modules()}
        self.normalisations = [m for m in inside.values() if isinstance(m, NormBase)]
        self.offload = region.offload
        self._inside, self._reader = list(inside.values()), reader
        self._sources: list[ForeignGenerator] | None = None
        self.latest: Callable[[], Frame | None] = _no_frame
        self._open: Callable[[], Frame | None] = _no_frame

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": _no_frame, "latest": _no_frame, "_sources": None, "_reader": Reader()}

    def call(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's forward pass, within the open pass or a new one."""
        frame = self._open()
        if frame is None or not frame.continues_with(position):
            kept = KeptOutputs(self.occurrences, self.offload) if self.occurrences else None
            if self._sources is None:  # the generators besides PyTorch's own that the region may draw from
                self._sources = foreign_generators(generators_of(self._inside, self._reader))
            frame = Frame(self.modules, self._inside, self.normalisations, kept, self.offload, self._sources)
        self._open = _no_frame
        out = frame.call(position, forward, args, kwargs)
        self.latest = weakref.ref(frame)
        if not frame.closed:
            # Autograd's hooks hold the frame; where nothing was saved yet, there are none.
            self._open = weakref.ref(frame) if frame.holders else lambda: frame
        return out


class _Prefetch:
    """A forward hook of a module: when the backward pass reaches the module, an earlier region is copied back."""

    def __init__(self, passes: _Passes) -> None:
        self.passes = passes

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        frame, self.passes.latest = self.passes.latest, _no_frame
        if frame() is None or not torch.is_grad_enabled():
            return

        def prefetch(_: torch.Tensor) -> None:
            alive = frame()
            if alive is not None:
                alive.prefetch()

        tensor = next((t for t in tensors_in(output) if has_history(t)), None)
        if tensor is not None:
            tensor.register_hook(prefetch)


def _no_frame() -> None:
    return None


class _Recomputed:
    """A module's checkpointed `forward`. A deep copy of the module has a copy bound to it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None, passes: _Passes, position: int) -> None:
        self.module, self.forward, self.passes, self.position = module, forward, passes, position

    @disable_dynamo  # within compiled code a region is not recomputed: Dynamo traces no hooks of saved tensors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward or functools.partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        forward = within_region(self.module, forward, args, kwargs)
        return self.passes.call(self.position, forward, args, kwargs)

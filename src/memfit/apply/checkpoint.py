"""Activation checkpointing as a lever: modules whose forward pass runs again in the backward pass.

Through `torch.utils.checkpoint`, non-reentrant, on the user's unmodified modules: `module.forward`
is wrapped on the instance, so that names, hooks and state dicts stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit.errors import PlanError, PlanMismatchError
from memfit.ir.remat import Keep, Region

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def checkpointed(model: nn.Module, regions: Sequence[Region]) -> Iterator[None]:
    """Checkpoint the modules of a model that `regions` names, until the context is left.

    Args:
        model: The model.
        regions: Which modules, and the operators whose outputs are kept.

    Raises:
        PlanMismatchError: The model has no module of that name.
        PlanError: A module is checkpointed already, or lies within another region.
    """
    modules = dict(model.named_modules())
    keeps = {fqn: region.keep for region in regions for fqn in region.modules}
    _check(modules, keeps)
    before = {fqn: modules[fqn].__dict__.get("forward") for fqn in keeps}
    try:
        for fqn, keep in keeps.items():
            modules[fqn].forward = _Recomputed(modules[fqn], before[fqn], keep)
        yield
    finally:
        for fqn, forward in before.items():
            modules[fqn].__dict__.pop("forward", None)
            if forward is not None:
                modules[fqn].forward = forward


def is_checkpointed(model: nn.Module) -> bool:
    """Tell whether a model's modules are checkpointed by `checkpointed` at present."""
    return any(_is_recomputed(module) for module in model.modules())


def _is_recomputed(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _Recomputed)


def _within(inner: str, outer: str) -> bool:
    return outer == "" or inner == outer or inner.startswith(outer + ".")


def _check(modules: Mapping[str, nn.Module], regions: Mapping[str, Keep]) -> None:
    active = [fqn for fqn, module in modules.items() if _is_recomputed(module)]
    for fqn in regions:
        if fqn not in modules:
            raise PlanMismatchError(
                f"the plan checkpoints the module {fqn!r}, which the model does not have: the plan is for another model"
            )
        outer = next((other for other in regions if other != fqn and _within(fqn, other)), None)
        if outer is not None:
            raise PlanError(
                f"the plan checkpoints {fqn!r} and {outer!r} around it: remove one of the two from its regions"
            )
        earlier = next((other for other in active if _within(fqn, other) or _within(other, fqn)), None)
        if earlier is not None:
            raise PlanError(f"{earlier!r} is checkpointed by a plan already: call close() on the earlier step first")


class _Recomputed:
    """A module's `forward`, run under checkpointing. Copies with the module (`copy.deepcopy`), bound to the copy."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None, keep: Keep) -> None:
        self.module, self.forward, self.keep = module, forward, keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward or functools.partial(type(self.module).forward, self.module)
        first = {id(a): i for i, a in reversed(list(enumerate(args)))}
        places = [first[id(a)] for a in args]

        def run(*given: Any, **named: Any) -> Any:
            # `checkpoint` hands back a new object for each argument; some modules ask whether two are the same
            # (self-attention in nn.MultiheadAttention), so that they must be the same again.
            return forward(*(given[place] for place in places), **named)

        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> _Contexts:
        selective = _selective_contexts(self.keep) if self.keep else None
        first, again = selective or (contextlib.nullcontext(), contextlib.nullcontext())
        normalisations = [m for m in self.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        return first, _statistics_untouched(again, normalisations)


def _selective_contexts(keep: Keep) -> _Contexts:
    """Return contexts that keep the outputs of operators named "overload#occurrence"."""
    wanted = frozenset(keep)
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operator)
        count = seen[context.is_recompute]
        key = f"{name}#{count[name]}"
        count[name] += 1
        return CheckpointPolicy.MUST_SAVE if key in wanted else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, again


@contextlib.contextmanager
def _statistics_untouched(
    inner: contextlib.AbstractContextManager[Any], normalisations: Sequence[nn.Module]
) -> Iterator[None]:
    """Recompute on copies of running statistics: a batch counts once, and as many tensors are saved as before."""
    originals = [(m, name, m._buffers[name]) for m in normalisations for name in _STATISTICS if m.training]
    for module, name, buffer in originals:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer

"""Activation checkpointing as a lever: modules whose forward pass runs again in the backward pass.

Through `torch.utils.checkpoint`, non-reentrant, on the user's unmodified modules: `module.forward`
is wrapped on the instance, so that names, hooks and state dicts stay as they are.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit.errors import PlanMismatchError
from memfit.ir.remat import Keep

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def checkpointed(model: nn.Module, regions: Mapping[str, Keep]) -> Iterator[None]:
    """Checkpoint the modules of a model that `regions` names, until the context is left.

    Args:
        model: The model.
        regions: For each module FQN, the operators whose outputs are kept.

    Raises:
        PlanMismatchError: The model has no module of that name.
    """
    modules = dict(model.named_modules())
    for fqn in regions:
        if fqn not in modules:
            raise PlanMismatchError(
                f"the plan checkpoints the module {fqn!r}, which the model does not have: the plan is for another model"
            )
    wrapped = [modules[fqn] for fqn in regions]
    try:
        for fqn, keep in regions.items():
            module = modules[fqn]
            module.forward = _checkpointed_forward(module, keep)
        yield
    finally:
        for module in wrapped:
            module.__dict__.pop("forward", None)


def _checkpointed_forward(module: nn.Module, keep: Keep) -> Callable[..., Any]:
    forward = module.forward
    normalisations = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    def contexts() -> _Contexts:
        first, again = _selective_contexts(keep) if keep else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, _statistics_untouched(again, normalisations)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


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
def _statistics_untouched(inner: contextlib.AbstractContextManager[Any], normalisations: list[nn.Module]) -> Iterator[None]:
    """Recompute on copies of running statistics, so that a batch counts once; what is saved stays the same in number."""
    originals = [(m, name, m._buffers[name]) for m in normalisations for name in _STATISTICS if m.training]
    for module, name, buffer in originals:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer

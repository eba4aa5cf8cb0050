"""Modules of a model checkpointed in place: alone, or runs of a container's layers as one region."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memfit.errors import PlanError, PlanMismatchError
from memfit.frameworks.jittor.checkpoint import checkpoint
from memfit.frameworks.jittor.internals import jt
from memfit.frameworks.jittor.variables import modules_of
from memfit.ir.remat import Region


@contextlib.contextmanager
def checkpointed(model: Any, regions: Sequence[Region]) -> Iterator[None]:
    """Recompute regions of a model in the backward pass, for calls inside this context.

    Args:
        model: The model; its modules are restored afterwards.
        regions: Modules by FQN: one, or several in a row in a `jittor.nn.Sequential`.

    Raises:
        PlanError: A region keeps operators or offloads, which is for PyTorch only.
        PlanMismatchError: The model has no such modules, or they are not in a row.
    """
    modules = modules_of(model)
    with contextlib.ExitStack() as stack:
        for region in regions:
            if region.keep or region.offload:
                raise PlanError(
                    f"the plan's levers.regions keep operators or offload in {region.modules[0]!r}, which"
                    " memfit.jittor can't do: leave out keep= and offload="
                )
            members = [_module(modules, fqn) for fqn in region.modules]
            if len(members) > 1:
                _check_run(modules, region.modules)
            stack.enter_context(executing(members[0], _together(region.modules, members)))
            for member in members[1:]:
                stack.enter_context(executing(member, lambda x: x))
        yield


@contextlib.contextmanager
def executing(module: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a module run another function, inside this context."""
    own = "execute" in vars(module)
    before = module.execute
    module.execute = function
    try:
        yield
    finally:
        if own:
            module.execute = before
        else:
            del module.execute


def _module(modules: dict[str, Any], fqn: str) -> Any:
    if fqn not in modules:
        raise PlanMismatchError(
            f"the plan's levers.regions name the module {fqn!r}, which Workload.model does not have"
        )
    return modules[fqn]


def _check_run(modules: dict[str, Any], fqns: Sequence[str]) -> None:
    """Check that modules follow one another in one container, so that no other code uses their intermediate results."""
    parent = fqns[0].rpartition(".")[0]
    container = modules.get(parent)
    names = container.layers if container is not None and is_chain(container) else ()
    layers = [f"{parent}.{name}" if parent else name for name in names]
    start = layers.index(fqns[0]) if fqns[0] in layers else 0
    if layers[start : start + len(fqns)] != list(fqns):
        raise PlanMismatchError(
            f"the plan's levers.regions join {', '.join(fqns)}, which no nn.Sequential calls in turn"
        )


def is_chain(module: Any) -> bool:
    """Return whether a module calls its layers one after the other, and does nothing else."""
    return isinstance(module, jt.nn.Sequential) and type(module).execute is jt.nn.Sequential.execute


def _together(fqns: Sequence[str], members: Sequence[Any]) -> Callable[..., Any]:
    region = Chain(fqns, members)
    return lambda *args, **kwargs: checkpoint(region, *args, **kwargs)


class Chain(jt.Module):
    """Modules called one after the other by their present `execute`, even if it is replaced later."""

    def __init__(self, fqns: Sequence[str], members: Sequence[Any]) -> None:
        super().__init__()
        for index, member in enumerate(members):
            setattr(self, f"member{index}", member)
        self.fqns = tuple(fqns)
        self.executes = [member.execute for member in members]

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        value = self.executes[0](*args, **kwargs)
        for execute in self.executes[1:]:
            value = execute(value)
        return value

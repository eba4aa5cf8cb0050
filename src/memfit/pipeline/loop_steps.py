"""The steps that a loop makes: their kinds, their words, their workload, and the calls that a plan holds."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit._torch import tree_leaves
from memfit.capture import Seen, Watcher, parameters_of
from memfit.errors import UsageError
from memfit.foundations import format_bytes
from memfit.training import CombinedOptimizers
from memfit.workload import (
    CallNumber,
    Entry,
    ExecutionContext,
    Extent,
    LoopWorkload,
    ModuleTensor,
    RecordedStep,
    Tape,
    covers,
    difference_text,
    in_turn,
    leaves_of,
    looked_ahead,
    sizes_changed,
)

AND = " and "
"""Between the classes of the modules that a loop calls, in its workload's name."""


@dataclass
class StepKind:
    """A kind of step that the loop made."""

    seen: Seen
    step: RecordedStep
    saw: str = ""
    is_planned: bool = True

    def is_gone(self, watcher: Watcher) -> bool:
        """Tell whether an optimizer of the step is gone, and so is its training."""
        return any(watcher.optimizers[number] is None for number in self.step.optimizers)


class LargerBatches:
    """The calls of modules that a loop's plan holds, by their arguments' extents."""

    def __init__(self) -> None:
        self._promised: dict[CallNumber, list[Extent]] = {}
        self._grown = 0

    def forget(self) -> None:
        """Note that another plan is in force."""
        self._promised.clear()

    def promise(self, steps: Sequence[RecordedStep], also: Mapping[CallNumber, Extent] | None = None) -> None:
        """Note that a plan holds steps."""
        for number, extent in [call for step in steps for call in step.calls.items()] + list((also or {}).items()):
            if not self.holds(number, extent):
                known = self._promised.setdefault(number, [])
                known[:] = [other for other in known if not covers(extent, other)] + [extent]
        self._grown += also is not None

    def holds(self, number: CallNumber, extent: Extent) -> bool:
        """Tell whether the plan holds a call."""
        return any(covers(known, extent) for known in self._promised.get(number, ()))

    def difference(self, number: CallNumber, extent: Extent) -> str:
        """Return how a call exceeds those that the plan holds, in words."""
        return difference_text(extent, self._largest(number))

    def targets(self, number: CallNumber, extent: Extent) -> list[Extent]:
        """Return the extents to plan for: where batches grow again and again, a larger one first."""
        ahead = looked_ahead(self._largest(number), extent)
        return [ahead, extent] if self._grown and ahead != extent else [extent]

    def resized(self, step: RecordedStep, number: CallNumber, target: Extent) -> RecordedStep:
        """Return a step as it would be with a larger call."""
        before = step.calls.get(number, {})
        pairs = [(column.shape, target[path].shape) for path, column in before.items() if path in target]
        return step.resized(sizes_changed(pairs))

    def _largest(self, number: CallNumber) -> Extent:
        known = self._promised.get(number)
        return known[-1] if known else {}


def module_workload(
    module: nn.Module, args: Any, kwargs: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> LoopWorkload:
    """Return a call of a module as a workload, with a loss that stands for the loop's own."""
    loss = functools.partial(_standing_in, ExecutionContext.now())
    return _workload(module, [args, kwargs], loss, optimizers, [module])


def workload_of(steps: Sequence[RecordedStep], watcher: Watcher) -> LoopWorkload:
    """Return steps that were seen as a workload; refuse what can't be run again."""
    if watcher.fault:
        raise UsageError(
            f"the step can't be planned where it runs, since {watcher.fault}: write it as a memfit.Workload"
        )
    numbers = sorted({number for step in steps for number in step.roots})
    roots = {number: watcher.roots[number] for number in numbers}
    names = {number: f"{i}_{type(root).__name__}" for i, (number, root) in enumerate(roots.items())}
    model: nn.Module = _Roots({names[number]: root for number, root in roots.items()})
    if len(roots) == 1:
        model, names = roots[numbers[0]], {numbers[0]: ""}
    stepped = sorted({number for step in steps for number in step.optimizers})
    optimizers = [o for number in stepped if (o := watcher.optimizers[number]) is not None]
    step = in_turn(steps)
    tape = Tape(
        tuple(replace(e, what=stepped.index(e.what)) if e.kind == "update" else e for e in step.entries),
        tuple(names.get(n, names[numbers[0]]) for n in range(len(watcher.roots))),
        step.passes,
    )
    return _workload(model, step.given, _not_called, optimizers, list(roots.values()), tape)


def roots_of(model: nn.Module) -> list[nn.Module]:
    return list(model.children()) if isinstance(model, _Roots) else [model]


class _Roots(nn.Module):
    """The modules that a loop calls, as the children of one."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, root in roots.items():
            self.add_module(name, root)


def _workload(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    roots: Sequence[nn.Module],
    tape: Tape | None = None,
) -> LoopWorkload:
    """Return a step of the loop as a workload, named by the classes of the modules that it calls."""
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else CombinedOptimizers(optimizers)
    return LoopWorkload(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        optimizer=optimizer,
        name=AND.join(dict.fromkeys(type(root).__name__ for root in roots)),
        batch_size=1,
        tape=tape or Tape(),
    )


def _standing_in(context: ExecutionContext, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a loss in the place of the loop's own: what the model returns as one, or what takes as much as most."""
    args, kwargs = batch
    with context.entered():
        found = [t for t in leaves_of(model(*args, **kwargs)) if t.is_floating_point() and t.requires_grad]
        scalars = [t for t in found if t.dim() == 0]
        return sum(scalars or [t.float().log_softmax(-1).exp().square().mean() for t in found], torch.zeros(()))


def _not_called(model: nn.Module, batch: Any) -> torch.Tensor:
    raise AssertionError("the step of a taped workload is its tape")


def step_text(
    entries: Sequence[Entry], roots: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer | None]
) -> str:
    """Return what a step does, in words."""
    calls = Counter(type(roots[e.what]).__name__ for e in entries if e.kind == "module" and e.context.grad)
    updates = Counter(type(optimizers[e.what]).__name__ for e in entries if e.kind == "update")
    words = [f"{_counted(n, 'call')} of {name}" for name, n in calls.items()]
    words.append(_counted(sum(e.kind == "backward" for e in entries), "backward pass", "es"))
    words += [f"{_counted(n, 'update')} by {name}" for name, n in updates.items()]
    words.append("gradients clipped" if _clips(entries) else "gradients not clipped")
    return ", ".join(words)


def _clips(entries: Sequence[Entry]) -> bool:
    """Tell whether a step changes gradients between its backward passes and its update."""
    taken: set[int] = set()
    for entry in entries:
        name = getattr(entry.what, "__name__", "")
        if name == "__get__" and any(isinstance(r, ModuleTensor) for r in entry.arguments.references):
            taken |= set(entry.made)
        numbers = {getattr(r, "number", None) for r in entry.arguments.references}
        if name.rstrip("_") != name and "mul" in name and numbers & taken:
            return True
    return False


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def untrained_texts(
    optimizers: Iterable[torch.optim.Optimizer], stepped: Iterable[torch.optim.Optimizer | None]
) -> list[str]:
    """Return what is known of parameters that an optimizer holds and that no step trained.

    Args:
        stepped: The optimizers of the steps so far.
    """
    known = set(map(id, stepped))
    lines = []
    for optimizer in optimizers:
        waiting = [p for p in parameters_of(optimizer) if id(optimizer) not in known or not p.requires_grad]
        if waiting:
            nbytes = format_bytes(sum(p.nbytes for p in waiting))
            wanted = set(map(id, waiting))  # the owner is the smallest module that holds them
            modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
            held = [({id(p) for p in module.parameters()}, module) for module in modules]
            owners = [(len(ids), type(module).__name__) for ids, module in held if wanted <= ids]
            owner = f" of {min(owners, key=lambda each: each[0])[1]}" if owners else ""
            lines.append(
                f"memfit: {len(waiting)} parameters{owner} ({nbytes}) in optimizer"
                f" {type(optimizer).__name__} have not trained yet. The plan does not cover steps that"
                " train them; memfit plans such a step when it runs"
            )
    return lines


@contextlib.contextmanager
def generators_kept(tape: Tape) -> Iterator[None]:
    """Set the generators that a step draws from back on leaving: they are the loop's own, not copies."""
    held = [leaf for entry in tape.entries for leaf in tree_leaves(entry.arguments.template)]
    generators = {id(leaf): leaf for leaf in held if isinstance(leaf, torch.Generator)}.values()
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

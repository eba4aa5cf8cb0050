"""Activation checkpointing as users write it by hand: blocks, every K-th block, segments, and a model's own switch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frontier.methods import PLAIN, Method, Prepared, Task, Unsupported, stepping
from memfit.workload import Workload

Contexts = Callable[[], Any]
"""Makes the pair of contexts that `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""


Forwards = Mapping[nn.Module, Callable[..., Any]]
"""What modules run in place of their own forward."""
Replaced = Mapping[nn.Module, Mapping[str, nn.Module]]
"""What modules hold in place of their own children."""


def checkpointing(model: nn.Module, regions: Mapping[str, Contexts | None]) -> contextlib.AbstractContextManager[None]:
    """Run the modules of these FQNs under non-reentrant checkpoints, each with its contexts if any."""
    return forwarding(checkpointed(model, regions))


def checkpointed(model: nn.Module, regions: Mapping[str, Contexts | None]) -> Forwards:
    """Return the forwards under checkpoints of the modules of these FQNs: what is compiled must find the same again."""
    made: dict[nn.Module, Callable[..., Any]] = {}
    for fqn, contexts in regions.items():
        module = model.get_submodule(fqn)
        selective: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        made[module] = functools.partial(checkpoint, module.forward, use_reentrant=False, **selective)
    return made


@contextlib.contextmanager
def forwarding(forwards: Forwards) -> Iterator[None]:
    """Run modules with other forwards than their class's."""
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


class Segment(nn.Module):
    """Blocks that follow one another, under one checkpoint."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, x, *args, use_reentrant=False, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def segmented(model: nn.Module, chains: Sequence[Sequence[str]], size: int) -> contextlib.AbstractContextManager[None]:
    """Cut each chain of blocks into segments of a size, and put these into the model's lists for the blocks."""
    return holding(segments(model, chains, size))


def segments(model: nn.Module, chains: Sequence[Sequence[str]], size: int) -> Replaced:
    """Return the lists of blocks of these chains, each with the segments that take the place of its blocks."""
    made = {}
    for chain in chains:
        blocks = [model.get_submodule(fqn) for fqn in chain]
        cut = [Segment(blocks[start : start + size]) for start in range(0, len(blocks), size)]
        parent = model.get_submodule(chain[0].rpartition(".")[0])
        made[parent] = {str(index): segment for index, segment in enumerate(cut)}
    return made


@contextlib.contextmanager
def holding(replaced: Replaced) -> Iterator[None]:
    """Let modules hold other children than their own."""
    before = {parent: dict(parent._modules) for parent in replaced}
    try:
        for parent, children in replaced.items():
            _set_children(parent, children)
        yield
    finally:
        for parent, own in before.items():
            _set_children(parent, own)


def _set_children(parent: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    parent._modules.clear()
    parent._modules.update(children)


def whole(fqns: Sequence[str]) -> dict[str, Contexts | None]:
    """Return regions that keep nothing inside."""
    return dict.fromkeys(fqns)


def _plain(task: Task, studied: None, setting: str) -> Prepared:
    return Prepared(stepping(lambda workload: contextlib.nullcontext()))


def _blocks(task: Task, studied: None, every: int) -> Prepared:
    regions = whole(task.subject.blocks[::every])
    return Prepared(stepping(lambda workload: checkpointing(workload.model, regions)))


def segment_sizes(task: Task) -> list[int]:
    """Return segments of 2, 3 and 4 blocks, and as many segments as they have blocks (√N), where there are chains."""
    longest = max(map(len, task.subject.chains))
    root = math.ceil(math.sqrt(len(task.subject.blocks)))
    return sorted({size for size in (2, 3, 4, root) if size <= longest and longest > 1})


def _segments(task: Task, studied: None, size: int) -> Prepared:
    return Prepared(stepping(lambda workload: segmented(workload.model, task.subject.chains, size)))


def _levels(task: Task, studied: None, level: str) -> Prepared:
    """Checkpoint everything from a level down as one, and each block above it."""
    above = [fqn for fqn in task.subject.blocks if not fqn.startswith(level + ".")]
    return Prepared(stepping(lambda workload: checkpointing(workload.model, whole([*above, level]))))


def _switch(task: Task, studied: None, setting: str) -> Prepared:
    model = task.workload.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise Unsupported(f"{type(model).__name__} is not of transformers and has no such switch")
    if not model.supports_gradient_checkpointing:
        raise Unsupported(f"transformers' {type(model).__name__} does not support it")
    return Prepared(stepping(_switched))


@contextlib.contextmanager
def _switched(workload: Workload) -> Iterator[None]:
    model: Any = workload.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


CHECKPOINTING = (
    Method(PLAIN, "eager", lambda task: [""], _plain),
    Method("checkpoint every K-th block", "eager", lambda task: [1, 2, 4], _blocks),
    Method("segments of K blocks", "eager", segment_sizes, _segments),
    Method("checkpoint from a level down", "eager", lambda task: task.subject.levels, _levels),
    Method("transformers' switch", "eager", lambda task: [""], _switch),
)

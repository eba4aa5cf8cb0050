"""Measures the bytes that each module of a model keeps for the backward pass, and its seconds.

A module is run by itself, on the arguments that the model gave it: its gradients are requested, but only its result is
computed, so that exactly the result and the tensors saved for the backward pass are alive then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memfit.frameworks.jittor.checkpointing import executing, is_chain
from memfit.frameworks.jittor.draws import Draws, substituted
from memfit.frameworks.jittor.internals import jt
from memfit.frameworks.jittor.variables import emptied, filled, is_trainable, modules_of, nodes, variables_of

_TIMED = 3


@dataclass
class ProfiledBlock:
    """One call of a module in the forward pass.

    Attributes:
        start: Index of the first block inside it, in the order in which they end; its own where there is none.
        kept_bytes: Bytes that it keeps for the backward pass, its result included.
        children: Indices of the blocks directly inside.
    """

    fqn: str
    start: int
    arguments: Any
    kept_bytes: int = 0
    result_bytes: int = 0
    seconds: float = 0.0
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """The blocks of a forward pass in the order in which they end.

    Attributes:
        samples: Samples in the profiled batch; bytes and seconds are proportional to them.
        chains: Runs of blocks that a container calls one after the other, as indices.
    """

    samples: int
    blocks: list[ProfiledBlock]
    chains: list[list[int]]

    def own_bytes(self, index: int) -> int:
        """Return the bytes that a block keeps beyond the blocks inside it."""
        block = self.blocks[index]
        return max(0, block.kept_bytes - sum(self.blocks[c].kept_bytes for c in block.children))


def profile(model: Any, run: Callable[[], Any], samples: int, progress: Callable[[int, int], None]) -> Profile:
    """Measure the blocks of a model, which `run` runs forward on a batch of as many samples.

    Args:
        progress: Called with the number of blocks measured, and of all.
    """
    modules = modules_of(model)
    with substituted(Draws()), jt.no_grad():
        blocks = _recorded(modules, run)
    measured: dict[Any, tuple[int, int, float]] = {}
    for index, block in enumerate(blocks):
        key = _signature(modules[block.fqn], block.arguments)
        if key not in measured:
            measured[key] = _measured(modules[block.fqn], block.arguments)
        block.kept_bytes, block.result_bytes, block.seconds = measured[key]
        progress(index + 1, len(blocks))
    for block in blocks:
        block.arguments = None
    return Profile(samples, blocks, list(_chains(modules, blocks)))


def _recorded(modules: dict[str, Any], run: Callable[[], Any]) -> list[ProfiledBlock]:
    """Return the calls of modules that are called once, in the order in which they end."""
    blocks: list[ProfiledBlock] = []
    calls: dict[str, int] = {}
    inside: list[list[int]] = [[]]

    def recording(fqn: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls[fqn] = calls.get(fqn, 0) + 1
            start = len(blocks)
            inside.append([])
            result = execute(*args, **kwargs)
            children = inside.pop()
            if variables_of(result) and variables_of((args, kwargs)):
                inside[-1].append(len(blocks))
                blocks.append(ProfiledBlock(fqn, start, (args, kwargs), children=children))
            else:
                inside[-1] += children
            return result

        return record

    with contextlib.ExitStack() as stack:
        for fqn, module in modules.items():
            stack.enter_context(executing(module, recording(fqn, module.execute)))
        jt.sync(variables_of(run()))
    repeated = {fqn for fqn, count in calls.items() if count > 1}
    return blocks if not repeated else _without(blocks, repeated)


def _without(blocks: list[ProfiledBlock], repeated: set[str]) -> list[ProfiledBlock]:
    """Return blocks without those of modules that are called more than once: they can't be told apart."""
    unique = [b for b in blocks if b.fqn not in repeated]
    place = {id(b): i for i, b in enumerate(unique)}
    for block in unique:
        inner = (c for child in block.children for c in _outermost(blocks, child, repeated))
        block.children = [place[id(blocks[c])] for c in inner]
        block.start = min((unique[c].start for c in block.children), default=place[id(block)])  # inner ones come first
    return unique


def _outermost(blocks: list[ProfiledBlock], index: int, repeated: set[str]) -> Iterator[int]:
    if blocks[index].fqn not in repeated:
        yield index
    else:
        for child in blocks[index].children:
            yield from _outermost(blocks, child, repeated)


def _chains(modules: dict[str, Any], blocks: list[ProfiledBlock]) -> Iterator[list[int]]:
    """Yield runs of blocks that follow one another in a container which was called itself."""
    index_of = {block.fqn: i for i, block in enumerate(blocks)}
    for fqn, module in modules.items():
        if fqn in index_of and is_chain(module):
            names = [f"{fqn}.{name}" if fqn else name for name in module.layers]
            run: list[int] = []
            for name in [*names, None]:
                if name in index_of:
                    run.append(index_of[name])
                else:
                    if len(run) > 1:
                        yield run
                    run = []


def _signature(module: Any, arguments: Any) -> Any:
    """Return a key that calls of the same cost share."""
    parameters = tuple((tuple(v.shape), str(v.dtype)) for v in module.parameters())
    inputs = tuple((tuple(v.shape), str(v.dtype)) for v in variables_of(arguments))
    kinds = tuple(type(m).__qualname__ for m in modules_of(module).values())
    return kinds, parameters, inputs, repr(emptied(arguments))


def _measured(module: Any, arguments: Any) -> tuple[int, int, float]:
    """Return the bytes that a module keeps, those of its result, and the seconds of its forward pass."""
    inputs = [v.detach() for v in variables_of(arguments)]
    jt.sync(inputs)
    args, kwargs = filled(emptied(arguments), inputs)
    with substituted(Draws()):
        before = _allocated_bytes()
        results = variables_of(module(*args, **kwargs))
        targets = [v for v in (*inputs, *module.parameters()) if is_trainable(v)]
        totals = [v.sum() for v in results if is_trainable(v)]
        gradients = jt.grad(sum(totals[1:], totals[0]), targets) if totals and targets else []
        jt.sync(results, False, False)
        kept_bytes = _allocated_bytes() - before
        del gradients, totals, results
        with jt.no_grad():
            seconds = min(_timed(lambda: module(*args, **kwargs)) for _ in range(_TIMED))
            results = variables_of(module(*args, **kwargs))
    return max(0, kept_bytes), sum(v.nbytes for v in results), seconds


def _allocated_bytes() -> int:
    """Return the bytes of all variables that have memory; those that share it count once."""
    sizes: dict[int, int] = {}
    for node in nodes():
        if node.address:
            sizes[node.address] = max(sizes.get(node.address, 0), node.nbytes)
    return sum(sizes.values())


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jt.sync(variables_of(run()), True)
    return time.perf_counter() - started

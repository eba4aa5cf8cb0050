"""fp16 for Jittor: casts of weights and inputs, with fp32 masters that the optimizer updates.

Jittor's own levels of mixed precision fail on the CPU or turn the optimizer's parameters to fp16; casts in the graph
do neither, and gradients reach the masters through them. Normalisations and layers without weights run in fp32, as
does what follows the model. On the CPU fp16 is software, about a hundred times slower: good for trying out only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jittor as jt

from memfit.jittor.regions import executing
from memfit.jittor.variables import FLOATS, is_trainable, mapped, modules_of, patched, slots_of

_NORMALISATIONS = (jt.nn.BatchNorm, jt.nn.LayerNorm, jt.nn.GroupNorm, jt.nn.InstanceNorm)


@contextlib.contextmanager
def half(model: Any) -> Iterator[None]:
    """Run a model in fp16, forward and backward, for calls and gradients inside this context."""
    full = [m for m in modules_of(model).values() if _runs_in_fp32(m)]
    kept = {id(v) for one in full for v in one.parameters()}
    casts: dict[int, Any] = {}
    masters = []
    for _, place, name in slots_of(model):
        master = place[name]
        if is_trainable(master) and str(master.dtype) == "float32" and id(master) not in kept:
            masters.append((place, name, master))
            place[name] = casts.setdefault(id(master), master.float16())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_comparable())
        for one in full:
            stack.enter_context(executing(one, _in(one.execute, "float32", "float16")))
        stack.enter_context(executing(model, _in(model.execute, "float16", "float32")))
        try:
            yield
        finally:
            for place, name, master in masters:
                place[name] = master


def _runs_in_fp32(module: Any) -> bool:
    """Return whether a module is a normalisation, or a layer without weights: activations, dropout, pooling."""
    return isinstance(module, _NORMALISATIONS) or (len(modules_of(module)) == 1 and not module.parameters())


_COMPARISONS = ("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__")


def _comparable() -> contextlib.AbstractContextManager[None]:
    """Compare fp16 variables in fp32: Jittor's code for the CPU does not compile otherwise, not even that of relu."""

    def widened(_: str, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda v, other: original(v.float32() if str(v.dtype) == "float16" else v, other)

    return patched(_COMPARISONS, widened)


def _in(execute: Callable[..., Any], inside: str, outside: str) -> Callable[..., Any]:
    """Return a function that gets its floats in one dtype and gives them in another."""

    @functools.wraps(execute)
    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), lambda v: _cast(v, inside))
        return mapped(execute(*args, **kwargs), lambda v: _cast(v, outside))

    return cast


def _cast(variable: Any, dtype: str) -> Any:
    return variable.cast(dtype) if str(variable.dtype) in FLOATS and str(variable.dtype) != dtype else variable

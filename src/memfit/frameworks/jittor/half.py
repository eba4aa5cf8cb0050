"""fp16 for Jittor: casts of weights and inputs, with fp32 master weights that the optimizer updates.

Jittor's own levels of mixed precision fail on the CPU or turn the optimizer's parameters to fp16; casts in the graph
do neither, and pass gradients on to the master weights. Normalisations, layers without weights, and the loss run in
fp32. On the CPU fp16 is emulated, about a hundred times slower: good for trying out only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from memfit.frameworks.jittor.checkpointing import executing
from memfit.frameworks.jittor.internals import jt
from memfit.frameworks.jittor.variables import FLOATS, is_trainable, mapped, modules_of, patched, slots_of

NORMALISATIONS = (jt.nn.BatchNorm, jt.nn.LayerNorm, jt.nn.GroupNorm, jt.nn.InstanceNorm)


@contextlib.contextmanager
def half(model: Any) -> Iterator[None]:
    """Run a model in fp16, forward and backward, for calls and gradients inside this context."""
    in_fp32 = [m for m in modules_of(model).values() if _runs_in_fp32(m)]
    fp32_ids = {id(v) for module in in_fp32 for v in module.parameters()}
    casts: dict[int, Any] = {}
    masters = []
    for _, place, name in slots_of(model):
        master = place[name]
        if is_trainable(master) and str(master.dtype) == "float32" and id(master) not in fp32_ids:
            masters.append((place, name, master))
            place[name] = casts.setdefault(id(master), master.float16())
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(_COMPARISONS, _in_fp32))
        for module in in_fp32:
            stack.enter_context(executing(module, _in(module.execute, "float32", "float16")))
        stack.enter_context(executing(model, _in(model.execute, "float16", "float32")))
        try:
            yield
        finally:
            for place, name, master in masters:
                place[name] = master


def _runs_in_fp32(module: Any) -> bool:
    """Return whether a module is a normalisation, or a layer without weights: activations, dropout, pooling."""
    return isinstance(module, NORMALISATIONS) or (len(modules_of(module)) == 1 and not module.parameters())


_COMPARISONS = ("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__")


def _in_fp32(_: str, comparison: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Compare fp16 variables in fp32: Jittor's CPU code for comparisons, as in relu, does not compile otherwise."""
    return lambda v, other: comparison(v.float32() if str(v.dtype) == "float16" else v, other)


def _in(execute: Callable[..., Any], inside: str, outside: str) -> Callable[..., Any]:
    """Wrap a function so that its floating-point inputs have one dtype and its outputs another."""

    @functools.wraps(execute)
    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), lambda v: _cast(v, inside))
        return mapped(execute(*args, **kwargs), lambda v: _cast(v, outside))

    return cast


def _cast(variable: Any, dtype: str) -> Any:
    return variable.cast(dtype) if str(variable.dtype) in FLOATS and str(variable.dtype) != dtype else variable

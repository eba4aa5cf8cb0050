"""Activation checkpointing for Jittor, which has none: drop a region's activations, and recompute them going backward.

It is exact, since:

1. The forward pass keeps the region's arguments, and no activations.
2. In the backward pass the region runs again, and is differentiated there. The incoming gradients are detached from
   their graph, or Jittor would differentiate through them too.
3. It runs again with the same random numbers (`substituted`), on the buffers of the first run. Its second writes to
   them are dropped, so that running statistics are updated once.
4. It reads no values: Jittor executes when values are read, and dies when it must do so in a backward pass.
5. It knows all variables that it differentiates: another one would get no gradient, silently. The graph of a
   function's first recomputation is searched for such variables.

Functions that break 4 or 5, or draw from NumPy or Python, are refused.

Random numbers are a function of a seed and a count, instead of a generator's hidden state. Jittor's generator can be
seeded, but its state can't be read: recomputed regions and resumed trainings would draw other numbers. Inside
`substituted`, `jt.random`, through which Jittor draws all its uniform and normal numbers (dropout, `jt.rand`,
`jt.randn`, `jt.randint`, initialisations), hashes the index of each element with a seed and the count of the draw:
counter-based, as in J. K. Salmon et al. (2011), *Parallel Random Numbers: As Easy as 1, 2, 3*, with the finalizer of
MurmurHash3 (A. Appleby) as the hash, which is enough for masks and noise but not cryptographic. The numbers differ
from Jittor's own, with the same distribution.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.errors import PlanError, PlanMismatchError, RecomputationError
from memfit.ir import Region
from memfit.jittor.internals import jt
from memfit.jittor.variables import (
    Node,
    buffers_of,
    emptied,
    executing,
    filled,
    is_chain,
    is_trainable,
    layers_of,
    modules_of,
    nodes,
    patched,
    put_back,
    reached,
    variables_of,
)

_READS = ("item", "numpy", "fetch_sync", "sync", "data", "tolist", "__bool__", "__int__", "__float__", "__index__")
_searched: weakref.WeakSet[Any] = weakref.WeakSet()
_WORD = 2**32
_GOLDEN = 0x9E3779B9
_UNIT = 2.0**-24


def checkpoint(function: Callable[..., Any], *args: Any, parameters: Sequence[Any] | None = None, **kwargs: Any) -> Any:
    """Call a module or function, and recompute it in the backward pass instead of keeping its activations.

    Args:
        function: A module, or a function of variables. It runs again in the backward pass.
        *args: Its arguments, and those by keyword; variables in nested lists, tuples and dicts are found.
        parameters: The variables that a function uses beside its arguments; None to find them in the module, or in the
            function's closure, defaults, globals and `functools.partial`.

    Raises:
        RecomputationError: The function reads values, draws random numbers from NumPy or Python, or uses variables
            missing from `parameters`, which is noticed in the backward pass.
    """
    holders = list(_holders(function, set()))
    held = (list(h.parameters()) if isinstance(h, jt.Module) else [h] for h in holders)
    used = [v for variables in held for v in variables] if parameters is None else list(parameters)
    inputs = variables_of((args, kwargs))
    region = _Region(function, emptied((args, kwargs)), inputs, [h for h in holders if isinstance(h, jt.Module)])
    taped = list({v.id: v for v in (*inputs, *used) if is_trainable(v)}.values())
    if jt.flags.no_grad or not taped:
        return region.run(inputs)
    results = region(*taped)
    return filled(region.structure, results if isinstance(results, list | tuple) else [results])


class _Region(jt.Function):
    """One call of a region. Jittor calls it with the variables that gradients are computed for."""

    def __init__(self, function: Callable[..., Any], arguments: Any, inputs: list[Any], modules: list[Any]) -> None:
        self.function = function
        self.arguments = arguments
        self.first = jt.array(0).id
        self.inputs = [v.detach() if is_trainable(v) else v for v in inputs]
        self.identities = [v.id for v in inputs]
        self.modules = modules
        fqns = getattr(function, "fqns", None)
        own_name = getattr(function, "__qualname__", type(function).__name__)
        self.name = own_name if fqns is None else " to ".join(dict.fromkeys((fqns[0], fqns[-1])))

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run the function once, with the given variables in its arguments."""
        with substituted(), _no_reads_and_draws(self.name):
            args, kwargs = filled(self.arguments, inputs)
            return self.function(*args, **kwargs)

    def __call__(self, *taped: Any) -> Any:
        self.taped = taped
        return super().__call__(*taped)

    def execute(self, *taped: Any) -> list[Any]:
        slots = (slot for module in self.modules for slot in buffers_of(module))
        self.buffers = [(place, name, place[name], place[name].detach().stop_grad()) for place, name in slots]
        self.start = Draws(draws.seed, draws.count)
        self.level = jt.flags.auto_mixed_precision_level
        with jt.no_grad():
            result = self.run(self.inputs)
        outputs = variables_of(result)
        self.structure = emptied(result)
        outside = {v.id for v in (*taped, *self.taped, *self.inputs)}
        return [v.clone() if v.id in outside else v for v in outputs]

    def grad(self, *gradients: Any) -> list[Any]:
        inputs = [v.detach() if is_trainable(v) else v for v in self.inputs]
        flags = jt.flag_scope(no_grad=0, auto_mixed_precision_level=self.level)
        with flags, put_back((place, name) for place, name, *_ in self.buffers), substituted(self.start):
            for place, name, _, before in self.buffers:
                place[name] = before.detach().stop_grad()
            result = self.run(inputs)
        pairs = [(v, g.stop_grad()) for v, g in zip(variables_of(result), gradients, strict=True) if g is not None]
        recomputed = dict(zip(self.identities, inputs, strict=True))
        targets = [recomputed.get(v.id, v) for v in self.taped]
        self._search(variables_of(result), targets)
        del result
        self.inputs, self.buffers, self.taped = [], [], ()
        if not pairs:
            return [None] * len(targets)
        ends = _Incoming([g for _, g in pairs])(*(v for v, _ in pairs))
        total = sum((v.sum() for v in ends[1:]), ends[0].sum())  # never computed: `_Incoming` ignores its gradient
        del pairs, ends
        return list(jt.grad(total, targets, retain_graph=False))

    def _search(self, outputs: list[Any], targets: list[Any]) -> None:
        """Search the graph of the function's first recomputation for parameters that are not among the targets."""
        first = getattr(self.function, "member0", self.function)  # of a run of modules, which is made anew each time
        key = first if isinstance(first, jt.Module) else getattr(first, "__code__", None)
        if key is None or key in _searched:
            return
        known = {v.id for v in targets}

        def is_older(node: Node) -> bool:
            return 0 <= node.id < self.first

        def leads_on(node: Node) -> bool:
            return node.id < 0 or (node.trainable and node.id not in known and not is_older(node))

        ancestors = reached(nodes(), [v.id for v in outputs], leads_on)
        missing = [node for node in ancestors if node.trainable and is_older(node) and node.id not in known]
        if missing:
            listed = ", ".join(f"{node.name or 'an unnamed one'} of shape {node.shape}" for node in missing[:3])
            raise RecomputationError(
                (self.name,),
                self.name,
                f"it uses variables that are not in parameters=, and they would get no gradient: {listed}",
            )
        _searched.add(key)


class _Incoming(jt.Function):
    """The identity, with given gradients in the backward pass."""

    def __init__(self, gradients: list[Any]) -> None:
        self.gradients = gradients

    def execute(self, *variables: Any) -> Any:
        return variables

    def grad(self, *_: Any) -> list[Any]:
        return self.gradients


def _holders(function: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the modules and variables that a function can reach without arguments."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, jt.Module | jt.Var):
        yield function
        return
    parts: Iterable[Any] = ()
    if isinstance(function, functools.partial):
        parts = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, list | tuple | dict):
        parts = function.values() if isinstance(function, dict) else function
    elif inspect.ismethod(function):
        parts = (function.__self__, function.__func__)
    elif inspect.isfunction(function) and not function.__module__.startswith(("jittor", "memfit.jittor")):
        used = inspect.getclosurevars(function)
        parts = (*used.nonlocals.values(), *used.globals.values(), *(function.__defaults__ or ()))
    for part in parts:
        yield from _holders(part, seen)


@contextlib.contextmanager
def _no_reads_and_draws(name: str) -> Iterator[None]:
    """Refuse to read values, and to draw from Python's and NumPy's generators, which is not repeated."""

    def refusal(read: str, _: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RecomputationError((name,), name, f"it reads values with {read}, and Jittor must execute for that")

        return property(refuse) if read == "data" else refuse

    before = _generators()
    with patched(_READS, refusal):
        yield
    if _generators() != before:
        raise RecomputationError((name,), name, "it draws from Python's or NumPy's generator: use jt.random")


def _generators() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators, for comparison."""
    _, words, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(words).tobytes(), position, tuple(rest)


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
            fqns = region.modules
            for fqn in fqns:
                if fqn not in modules:
                    raise PlanMismatchError(
                        f"the plan's levers.regions name the module {fqn!r}, which Workload.model does not have"
                    )
            parent = fqns[0].rpartition(".")[0]
            container = modules.get(parent)
            layers = layers_of(parent, container) if container is not None and is_chain(container) else []
            start = layers.index(fqns[0]) if fqns[0] in layers else 0
            if len(fqns) > 1 and layers[start : start + len(fqns)] != list(fqns):  # else others may use what is between
                raise PlanMismatchError(
                    f"the plan's levers.regions join {', '.join(fqns)}, which no nn.Sequential calls in turn"
                )
            members = [modules[fqn] for fqn in fqns]
            stack.enter_context(executing(members[0], functools.partial(checkpoint, Chain(fqns, members))))
            for member in members[1:]:
                stack.enter_context(executing(member, lambda x: x))
        yield


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


# Random numbers


@dataclass
class Draws:
    """A position in a sequence of random numbers.

    Attributes:
        seed: The seed of the sequence (0 up to 2**32).
        count: Number of draws made.
    """

    seed: int = 0
    count: int = 0


draws = Draws()
"""The sequence in use."""


def seed(value: int) -> None:
    """Restart the sequence that `checkpoint` draws from, and seed Jittor, NumPy and Python.

    Pending operators run first: Jittor draws when it executes, so that `jt.set_global_seed` also changes draws that
    were requested before.
    """
    jt.sync_all()
    jt.set_global_seed(value)
    draws.seed, draws.count = value % _WORD, 0


@contextlib.contextmanager
def substituted(start: Draws | None = None) -> Iterator[None]:
    """Draw from the sequence: from its position, or again from `start`, and return to its position afterwards."""
    original, before = jt.random, Draws(draws.seed, draws.count)
    if start is not None:
        draws.seed, draws.count = start.seed, start.count
    jt.random = _random
    try:
        yield
    finally:
        jt.random = original
        if start is not None:
            draws.seed, draws.count = before.seed, before.count


def _random(shape: Any, dtype: str = "float32", type: str = "uniform") -> Any:
    """Replace `jt.random`: return random numbers of a shape, uniform in [0, 1) or standard normal."""
    sizes = [int(n) for n in (jt.NanoVector(shape) if isinstance(shape, int) else shape)]
    key = _hash_number(draws.seed ^ _hash_number(draws.count))
    draws.count += 1
    if type == "uniform":
        values = _uniform(sizes, key)
    else:  # Box and Muller (1958)
        radius = jt.sqrt(-2.0 * jt.log(1.0 - _uniform(sizes, key)))
        values = radius * jt.cos((2 * math.pi) * _uniform(sizes, _hash_number(key)))
    return values.cast(dtype).stop_grad()


def _uniform(sizes: list[int], key: int) -> Any:
    """Return 24 random bits for each element, as a fraction in [0, 1)."""
    index = jt.arange(math.prod(sizes)).uint32()
    word = _mixed(index * _word(_GOLDEN) + _word(key))
    return ((word >> 8).float32() * _UNIT).reshape(sizes)


def _mixed(word: Any) -> Any:
    """Return MurmurHash3's finalizer of words; it casts, since Jittor's products of unsigned words are signed."""
    word = word.uint32()
    word = ((word ^ (word >> 16).uint32()).uint32() * _word(0x85EBCA6B)).uint32()
    word = ((word ^ (word >> 13).uint32()).uint32() * _word(0xC2B2AE35)).uint32()
    return (word ^ (word >> 16).uint32()).uint32()


def _word(value: int) -> Any:
    return jt.array([value], dtype="uint32")


def _hash_number(value: int) -> int:
    """Return the hash of `_mixed` for one number."""
    word = (value + _GOLDEN) % _WORD
    word = (word ^ word >> 16) * 0x85EBCA6B % _WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 % _WORD
    return word ^ word >> 16

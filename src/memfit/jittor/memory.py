"""Jittor's memory: measured, listed by category, limited, and released.

The peak is that of Jittor's memory pools, which keep their high-water mark until `jt.gc`. It is the memory that Jittor
holds of the device, more than its variables need where the pools are fragmented.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from memfit.errors import MemoryLimitError, UsageError
from memfit.foundations import format_bytes, parse_budget
from memfit.jittor.internals import jt
from memfit.jittor.variables import (
    allocated_bytes,
    is_trainable,
    named_variables,
    nodes,
    patched,
    variables_of,
)

_WATCHED = ("item", "numpy", "fetch_sync", "sync", "data")
_limits: list[int] = []


@dataclass
class Measurement:
    """The peak and time of code that ran inside `measure`.

    Attributes:
        before_bytes: Bytes in the pools before, with nothing cached.
        peak_bytes: Most bytes in the pools.
    """

    before_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0

    @property
    def added_bytes(self) -> int:
        """The peak beyond the bytes held before."""
        return self.peak_bytes - self.before_bytes


def release() -> None:
    """Run pending operators, and release the pools' free memory to the system."""
    jt.sync_all(True)
    gc.collect()
    jt.gc()


def held_bytes() -> int:
    """Return the size of the pools on the device in bytes, used or free."""
    info = jt.get_mem_info()
    return int(info.total_cuda_used if jt.flags.use_cuda else info.total_cpu_used)


def device_bytes() -> int:
    """Return the bytes available to this process: a GPU's memory, or the machine's free memory."""
    return int(jt.get_mem_info().total_cuda_ram) if jt.flags.use_cuda else int(psutil.virtual_memory().available)


@contextlib.contextmanager
def measure() -> Iterator[Measurement]:
    """Measure the peak and time of the code inside this context. Pending operators run first."""
    measurement = Measurement()
    release()
    measurement.before_bytes = held_bytes()
    started = time.perf_counter()
    yield measurement
    jt.sync_all(True)
    measurement.seconds = time.perf_counter() - started
    measurement.peak_bytes = held_bytes()


def ledger(model: Any = None, optimizer: Any = None, batch: Any = None) -> dict[str, int]:
    """Return the bytes in the pools by category. Variables that share memory count once.

    Args:
        model: Its parameters and buffers become categories.
        optimizer: Its state and gradients become categories.
        batch: Its variables become the category "inputs".
    """
    jt.sync_all(True)
    groups = [] if optimizer is None else optimizer.param_groups
    owners: dict[int, str] = {}  # a later one takes precedence
    if optimizer is not None:
        owners |= {v.id: "optimizer state" for v in optimizer_state(optimizer)}
    owners |= {g.id: "gradients" for group in groups for g in group.get("grads", ())}
    owners |= {p.id: "parameters" for group in groups for p in group["params"]}
    named = {} if model is None else named_variables(model)
    owners |= {v.id: "parameters" if is_trainable(v) else "buffers" for v in named.values()}
    owners |= {v.id: "inputs" for v in variables_of(batch)}
    names = ("parameters", "buffers", "gradients", "optimizer state", "inputs", "other variables")
    totals = {**dict.fromkeys(names, 0), **allocated_bytes(owners)}
    return totals | {"free in the pools": max(0, held_bytes() - sum(totals.values()))}


def optimizer_state(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer keeps between steps, in the order of its groups."""
    groups = optimizer.param_groups
    lists = (g[key] for g in groups for key in sorted(g) if key not in ("params", "grads"))
    return [v for listed in lists if isinstance(listed, list | tuple) for v in variables_of(listed)]


def summary(model: Any = None, optimizer: Any = None, batch: Any = None) -> str:
    """Return the ledger as text, the largest first."""
    totals = ledger(model, optimizer, batch)
    rows = sorted(totals.items(), key=lambda row: -row[1])
    counts = jt.liveness_info()
    lines = [f"{name:<18}{format_bytes(nbytes):>12}" for name, nbytes in rows if nbytes]
    lines.append(f"{'in all':<18}{format_bytes(sum(totals.values())):>12}")
    lines.append(f"{counts['lived_vars']} variables and {counts['lived_ops']} operators alive")
    return "\n".join(lines)


@contextlib.contextmanager
def limit(budget: int | float | str, *, swap: bool = False) -> Iterator[None]:
    """Limit the bytes that Jittor allocates: an error stops the program before the system kills it.

    Jittor itself crashes with a segmentation fault when the CPU's memory is full. Inside this context a
    `memfit.jittor.Step` predicts its peak from runs with few samples before its first batch of a shape. Reading
    the values of a variable larger than the remaining bytes raises, too. Operators in other code are not watched.

    Args:
        budget: Bytes, a string with a unit ("300MiB"), or a share of the device's memory ("90%").
        swap: Let Jittor move variables to disk instead, which is slow. The program must have been started with
            JT_SAVE_MEM=1 in its environment: Jittor reads that once.

    Raises:
        BudgetError: `budget` can't be parsed.
        MemoryLimitError: A step or a variable would exceed it.
        UsageError: `swap` is True, but the program was started without JT_SAVE_MEM=1.
    """
    nbytes = parse_budget(budget, device_bytes())
    if swap:
        if os.environ.get("JT_SAVE_MEM") != "1":
            raise UsageError(
                "limit(swap=True) needs JT_SAVE_MEM=1 in the program's environment: set it before the program starts"
            )
        with jt.flag_scope(**{"device_mem_limit" if jt.flags.use_cuda else "cpu_mem_limit": nbytes}):
            yield
        return
    _limits.append(nbytes)
    try:
        with patched(_WATCHED, _watched):  # sizes of variables are checked before their values are made
            yield
    finally:
        _limits.pop()


def limit_bytes() -> int | None:
    """Return the smallest active limit."""
    return min(_limits, default=None)


def refuse(requested_bytes: int, where: str, **known: Any) -> None:
    """Raise MemoryLimitError if these further bytes exceed the active limit.

    Raises:
        MemoryLimitError: They would exceed it.
    """
    allowed = limit_bytes()
    if allowed is None or held_bytes() + requested_bytes <= allowed:
        return
    release()
    if (held := held_bytes()) + requested_bytes <= allowed:
        return
    by_category = {name: nbytes for name, nbytes in ledger(**known).items() if nbytes}
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in by_category.items())
    raise MemoryLimitError(
        f"{where} needs {format_bytes(requested_bytes)} more than the {format_bytes(held)} that Jittor has allocated"
        f" ({listed}). Together they exceed limit={format_bytes(allowed)}, so it was not run. Plan the step for this"
        " budget (memfit.jittor.plan), make the batch smaller, or raise limit's budget=",
        limit_bytes=allowed,
        held_bytes=held,
        requested_bytes=requested_bytes,
        by_category=by_category,
        where=where,
    )


def _watched(name: str, original: Any) -> Any:
    """Return an attribute that computes no variable larger than the remaining bytes below the limit."""

    def check(variable: Any) -> None:
        allowed = limit_bytes()
        if allowed is None or held_bytes() + variable.nbytes <= allowed:
            return
        if not any(node.id == variable.id and node.address for node in nodes()):
            refuse(variable.nbytes, f"a variable of shape {tuple(variable.shape)} ({variable.dtype})")

    def call(variable: Any, *args: Any, **kwargs: Any) -> Any:
        check(variable)
        return (original.__get__ if name == "data" else original)(variable, *args, **kwargs)

    return property(call, original.__set__) if name == "data" else call


@dataclass(frozen=True)
class PoolUse:
    """Statistics of a memory pool over a run.

    Attributes:
        requests: Number of requests for memory.
        requested_bytes: Bytes of all requests together.
        taken: Number of requests that the pool passed on to the system.
        taken_bytes: Bytes that it took from the system.
    """

    requests: int
    requested_bytes: int
    taken: int
    taken_bytes: int

    @property
    def reused_share(self) -> float:
        """The share of the requested bytes that came from memory in the pool."""
        return max(0.0, 1 - self.taken_bytes / self.requested_bytes) if self.requested_bytes else 0.0


def pool_use(run: Callable[[], Any]) -> PoolUse:
    """Run a function twice, drop its results, and return the pool's statistics."""
    found: list[int] = []
    for allocator in (2, 1):  # counted above the pool, and below it
        release()
        with jt.flag_scope(use_stat_allocator=allocator):
            calls, nbytes = jt.flags.stat_allocator_total_alloc_call, jt.flags.stat_allocator_total_alloc_byte
            run()
            jt.sync_all(True)
            found.append(int(jt.flags.stat_allocator_total_alloc_call) - calls)
            found.append(int(jt.flags.stat_allocator_total_alloc_byte) - nbytes)
    return PoolUse(*found)


@dataclass(frozen=True)
class FusionUse:
    """The savings of fused operators: the same run measured with and without fusion."""

    fused: Measurement
    apart: Measurement

    @property
    def saved_bytes(self) -> int:
        """The difference of the peaks."""
        return self.apart.added_bytes - self.fused.added_bytes


def fusion_use(run: Callable[[], Any]) -> FusionUse:
    """Run a function with and without fused operators, each twice, and return the second measurement of each."""
    found = []
    for no_fuse in (0, 1):
        with jt.flag_scope(no_fuse=no_fuse):
            for _ in range(2):  # the first compiles
                with measure() as measurement:
                    run()
        found.append(measurement)
    return FusionUse(*found)

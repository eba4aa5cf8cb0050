"""The trace of one steady training step: its operators, and the birth and death of its storages.

Time is the index of an operator in the step. A storage with birth `i` is allocated by operator `i`, and one with death
`j` is freed after operator `j` and before operator `j + 1`. Storages alive at the start of the step have birth -1, and
storages that outlive it have death `len(ops)`.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from memfit.ir.codec import Shown
from memfit.ir.levers import Sharding
from memfit.ir.operators import (
    COPY_IN,
    COPY_OUT,
    RECURRENT,
    SHARDS_IN,
    SHARDS_OUT,
    WAIT,
    is_collective,
    operator_class,
)

Phase = Literal["forward", "backward", "recompute", "optimizer"]
Category = Literal["parameters", "buffers", "gradients", "optimizer state", "inputs", "activations", "temporaries"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
BETWEEN_STEPS: tuple[Category, ...] = ("parameters", "buffers", "optimizer state", "inputs")
"""The categories of memory that is held between two steps too."""


def enclosing(fqn: str) -> set[str]:
    """Return the FQNs of a module and of those around it, the model's own, "", included."""
    parts = fqn.split(".")
    return {"", *(".".join(parts[: n + 1]) for n in range(len(parts)))}


class Module(msgspec.Struct, frozen=True, array_like=True):
    """A module of the model.

    Attributes:
        couples_batch: Whether its output for one sample depends on the other samples.
        tracks_statistics: Whether it is a normalisation that updates running statistics in the forward pass.
        refuses_hooks: Whether a transform of `torch.func` runs within it, which takes no saved-tensor hooks.
    """

    fqn: str
    kind: str
    couples_batch: bool
    tracks_statistics: bool
    refuses_hooks: bool = False


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """A parameter of the model; a shared one is listed once, under its first name.

    Attributes:
        itemsize: Bytes of one element.
        group: Index of its parameter group in the optimizer, or -1.
    """

    fqn: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    group: int

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter."""
        return math.prod(self.shape) * self.itemsize


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One forward call of a module: operators `start` to `end - 1`.

    Attributes:
        module: Index into `Trace.modules`.
        parent: Index into `Trace.calls`, or -1.
        inputs: The storages of the tensors among its arguments.
        phase: "recompute" for calls that happen inside the backward pass.
        activations: The `inputs` covered by a tensor that has a gradient and is an operator's output.
        changed: Value besides its arguments that its code reads and that differs by the backward pass; "" for none.
    """

    module: int
    parent: int
    microbatch: int
    start: int
    end: int
    inputs: tuple[int, ...]
    phase: Phase
    activations: tuple[int, ...] = ()
    changed: str = ""


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One operator as dispatched below autograd.

    Attributes:
        name: The overload ("aten.addmm.default").
        call: The innermost module call it belongs to (in the backward pass: the call whose forward
            operator it differentiates), or -1.
        signature: Index into `Trace.signatures`.
        mutates: Storages that it writes in place.
        random: Whether it draws random numbers.
        times: How often it runs for each time that it was recorded: it stands for those of equal tiles or chunks.
    """

    name: str
    call: int
    phase: Phase
    microbatch: int
    signature: int
    mutates: tuple[int, ...]
    random: bool
    times: int = 1


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The work of the calls of one signature, on any device.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions, as `torch.utils.flop_counter` counts.
        read_bytes: Bytes of the distinct memory that its tensor arguments cover.
        write_bytes: Bytes of the memory that it writes: outputs that are no views, and arguments written in place.
        dtype: Dtype of the first floating-point tensor argument, else of the first tensor, else of the output; "float8"
            for each of that width.
        kernel: Whether it runs a kernel; views and queries do not.
    """

    flops: int
    read_bytes: int
    write_bytes: int
    dtype: str
    kernel: bool


class Storage(msgspec.Struct, frozen=True, array_like=True):
    """A block of memory.

    Attributes:
        release: For storages born in the forward pass, the operator after which it would die if autograd kept nothing.
            Equal to `death` elsewhere.
        owner: For parameters and buffers, an index into `Trace.modules`; else -1.
        parameter: For parameters, their gradients and their optimizer state, an index into `Trace.parameters`; else -1.
        shape: Of the tensor that was made with it; () where that is not known.
    """

    nbytes: int
    birth: int
    death: int
    release: int
    category: Category
    owner: int
    parameter: int = -1
    shape: tuple[int, ...] = ()


class Save(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that autograd keeps for the backward pass.

    Attributes:
        at: Number of operators that had run when it was saved, just before operator `at`.
        call: The innermost module call in which it was saved, or -1.
        unpacked: Number of operators that had run when the backward pass first unpacked it; -1 if never.
        death: The operator after which autograd released it.
    """

    storage: int
    at: int
    call: int
    unpacked: int
    death: int


_AMID_RECOMPUTATION = frozenset({"aten.detach.default", COPY_OUT, COPY_IN, WAIT, SHARDS_OUT, SHARDS_IN})


class Trace(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A steady step, recorded.

    Attributes:
        microbatches: Number of recorded microbatches: at most two, of which the second stands for later ones; all where
            they differ, as sparse gradients do, which grow with each.
        fingerprint: Hash of the workload's parameters, modules, batch shapes and optimizer.
        signatures: The distinct operator calls, as text that `cost` can run again.
        works: The work of a call, by signature.
        notes: Assumptions made while capturing, for the reader.
        slack: Share of the peak that the step may take more on another control flow: for other random draws, or where
            values that code reads were guessed.
        sharding: How ranks share the step, of which this is one rank's; None for one process.
        selective: FQNs of recomputed modules of whose own operators some are not run again, as their outputs are kept.
    """

    schema: str = "memfit.trace/1"
    workload: str
    fingerprint: str
    torch_version: str
    device: str
    precision: str
    batch_size: int
    microbatch_size: int
    microbatches: int
    scale_microbatches: int
    modules: list[Module]
    calls: list[Call]
    ops: list[Op]
    storages: list[Storage]
    saves: list[Save]
    signatures: list[str]
    works: list[Work]
    parameters: list[Parameter] = []
    notes: list[str] = []
    slack: float = 0.0
    sharding: Sharding | None = None
    selective: list[str] = []

    @functools.cached_property
    def ancestors(self) -> list[tuple[int, ...]]:
        """For each call, the call itself and the calls around it, innermost first."""
        chains: list[tuple[int, ...]] = []
        for index, call in enumerate(self.calls):
            chains.append((index, *(chains[call.parent] if call.parent >= 0 else ())))
        return chains

    def call_chain(self, call: int) -> tuple[int, ...]:
        """Return a call and those around it, innermost first; empty for -1."""
        return self.ancestors[call] if call >= 0 else ()

    def fqn_of(self, call: int) -> str:
        """Return the FQN of a call's module, or "" outside the model."""
        return self.modules[self.calls[call].module].fqn if call >= 0 else ""

    @functools.cached_property
    def op_signatures(self) -> npt.NDArray[np.int64]:
        """The signature of each operator."""
        return np.array([op.signature for op in self.ops], np.int64)

    @functools.cached_property
    def is_of_second(self) -> npt.NDArray[np.bool_]:
        """Whether each operator is one of the second microbatch, which stands for later ones."""
        again = ("forward", "backward", "recompute")
        return np.array([op.microbatch == 1 and op.phase in again for op in self.ops], np.bool_)

    @functools.cached_property
    def storage_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of each storage."""
        return np.array([storage.nbytes for storage in self.storages], np.int64)

    @functools.cached_property
    def births(self) -> list[list[int]]:
        """For each operator, the storages that it allocates."""
        born: list[list[int]] = [[] for _ in self.ops]
        for index, storage in enumerate(self.storages):
            if storage.birth >= 0:
                born[storage.birth].append(index)
        return born

    @functools.cached_property
    def recomputed_runs(self) -> list[list[int]]:
        """The operators that a captured step recomputes: a list for each recomputation.

        Saved tensors are detached, and shards and copies from the host arrive, amid a recomputation.
        """
        runs: list[list[int]] = []
        follows = False
        for index, op in enumerate(self.ops):
            if op.phase == "recompute":
                if not follows:
                    runs.append([])
                runs[-1].append(index)
                follows = True
            elif op.name not in _AMID_RECOMPUTATION and not is_collective(op.name):
                follows = False
        return runs

    @property
    def later_microbatches(self) -> float:
        """The microbatches of the real step that the second one stands for, itself included.

        A last one of fewer samples is a part of one.
        """
        if self.microbatches == self.scale_microbatches:  # all were captured, each as it is
            return 1.0
        return self.batch_size / self.microbatch_size + 1 - self.microbatches

    @property
    def repeats(self) -> npt.NDArray[np.float64]:
        """How often each operator runs in the real step: the second microbatch stands for later ones."""
        return np.where(self.is_of_second, self.later_microbatches, 1.0) * self._times

    @functools.cached_property
    def _times(self) -> npt.NDArray[np.int64]:
        return np.array([op.times for op in self.ops], np.int64)

    def is_program_of(self, other: Trace) -> bool:
        """Tell whether two steps run the same operators, with storages that live as long."""
        alike = ("precision", "microbatches", "calls", "modules", "parameters", "saves")
        return (
            all(getattr(self, name) == getattr(other, name) for name in alike)
            and len(self.ops) == len(other.ops)
            and all(map(operator.eq, map(_op_key, self.ops), map(_op_key, other.ops)))
            and len(self.storages) == len(other.storages)
            and all(map(operator.eq, map(_life, self.storages), map(_life, other.storages)))
        )

    def of_samples(self, batch_size: int) -> Trace:
        """Return a step of two microbatches that stands for one of more samples: as many microbatches as they need."""
        count = -(-batch_size // self.microbatch_size)
        return replace(self, batch_size=batch_size, scale_microbatches=count)


_op_key = operator.attrgetter("name", "call", "phase", "microbatch", "mutates", "random", "times")
_life = operator.attrgetter("birth", "death", "release", "category", "owner", "parameter")


class _NotWholeError(Exception):
    """A number would not be whole, or two texts differ."""


def between(low: Trace, high: Trace, microbatch_size: int) -> Trace | None:
    """Return the trace of another microbatch size, from two of one program; None where they are not of one.

    The program of a step hardly depends on how many samples it has: the same operators, with tensors of other shapes.
    Every number that differs (a dimension, a stride, bytes, operations) is taken to be affine in the number of samples,
    which it is where samples are one dimension of a tensor. Where the two programs differ, a number would not be whole,
    or libraries size their buffers as they like (recurrent layers), nothing is made up.

    Args:
        low: Of fewer samples in a microbatch than `high`.
        microbatch_size: Samples of the wanted step's microbatch; `batch_size` is then that of as many microbatches
            as `high` has.
    """
    if not low.is_program_of(high) or any(operator_class(op.name) == RECURRENT for op in low.ops):
        return None
    part, whole = microbatch_size - low.microbatch_size, high.microbatch_size - low.microbatch_size

    def value(a: Any, b: Any) -> Any:
        if a == b:
            return a
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return [value(*pair) for pair in zip(a, b, strict=True)]
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {name: value(a[name], b[name]) for name in a}
        if type(a) is int and type(b) is int:
            steps, rest = divmod((b - a) * part, whole)
            if not rest:
                return a + steps
        elif isinstance(a, float | int) and isinstance(b, float | int) and type(a) is not bool:
            return a + (b - a) * part / whole  # a factor, which costs nothing
        raise _NotWholeError

    def storage(a: Storage, b: Storage) -> Storage:
        if a.nbytes == b.nbytes:
            return a
        try:
            shape = tuple(value(list(a.shape), list(b.shape)))
        except _NotWholeError:
            shape = ()
        return replace(a, nbytes=value(a.nbytes, b.nbytes), shape=shape)

    signatures: list[str] = []
    works: list[Work] = []
    known: dict[tuple[int, int], int] = {}
    try:
        for pair in ((a.signature, b.signature) for a, b in zip(low.ops, high.ops, strict=True)):
            if pair not in known:
                known[pair] = len(signatures)
                text, other = low.signatures[pair[0]], high.signatures[pair[1]]
                if text != other:
                    text = json.dumps(value(json.loads(text), json.loads(other)), separators=(",", ":"))
                a, b = low.works[pair[0]], high.works[pair[1]]
                flops, read = value(a.flops, b.flops), value(a.read_bytes, b.read_bytes)
                signatures.append(text)
                works.append(Work(flops, read, value(a.write_bytes, b.write_bytes), b.dtype, b.kernel))
        storages = [storage(a, b) for a, b in zip(low.storages, high.storages, strict=True)]
    except _NotWholeError:
        return None
    ops = zip(low.ops, high.ops, strict=True)
    return replace(
        low,
        ops=[replace(a, signature=known[a.signature, b.signature]) for a, b in ops],
        storages=storages,
        signatures=signatures,
        works=works,
        batch_size=microbatch_size * high.microbatches,
        microbatch_size=microbatch_size,
        scale_microbatches=high.microbatches,
        notes=high.notes,
        slack=max(low.slack, high.slack),
    )

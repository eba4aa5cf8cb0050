"""The trace of one steady training step: its operators, and the birth and death of its storages.

Time is the index of an operator in the step. A storage with birth `i` is allocated by operator `i`, and one with death
`j` is freed after operator `j` and before operator `j + 1`. Storages alive at the start of the step have birth -1, and
storages that outlive it have death `len(ops)`.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from memfit.ir.display import Shown
from memfit.ir.sharding import Sharding

Phase = Literal["forward", "backward", "recompute", "optimizer"]
Category = Literal["parameters", "buffers", "gradients", "optimizer state", "inputs", "activations", "temporaries"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
BETWEEN_STEPS: tuple[Category, ...] = ("parameters", "buffers", "optimizer state", "inputs")
"""The categories of memory that is held between two steps too."""


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
    """

    name: str
    call: int
    phase: Phase
    microbatch: int
    signature: int
    mutates: tuple[int, ...]
    random: bool


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The work of the calls of one signature, on any device.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions, as `torch.utils.flop_counter` counts.
        read_bytes: Bytes of the distinct memory that its tensor arguments cover.
        write_bytes: Bytes of the memory that it writes: outputs that are no views, and arguments written in place.
        dtype: Dtype of the first floating-point tensor argument, else of the first tensor, else of the output.
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


class Trace(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A steady step, recorded.

    Attributes:
        microbatches: Number of recorded microbatches: at most two, of which the second stands for later ones; all where
            they differ, as sparse gradients do, which grow with each.
        scale_microbatches: Number of microbatches of the real step.
        fingerprint: Hash of the workload's parameters, modules, batch shapes and optimizer.
        precision: Precision of the step.
        signatures: The distinct operator calls, as text that `cost` can run again.
        works: The work of a call, by signature.
        notes: Assumptions made while capturing, for the reader.
        slack: Share of the peak that the step may take more on another control flow: for other random draws, or where
            values that code reads were guessed.
        sharding: How ranks share the step, of which this is one rank's; None for one process.
        selective: FQNs of modules that are recomputed but for outputs of some operators, which are kept.
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

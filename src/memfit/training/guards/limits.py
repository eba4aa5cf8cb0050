"""Limits on the bytes of a step, which fail before they are exceeded; and a check for free memory.

On accelerators PyTorch's allocator keeps the limit itself. Its allocator for the CPU can't, and the operating system
counts something else: `RLIMIT_AS` limits address space, which the C library keeps after tensors are freed. So on the
CPU a dispatch mode adds up the storages alive, and the new bytes of each operator, known since its first call with
arguments of these shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memfit import hardware
from memfit._torch import EagerMode, FakeTensorMode, storage_key_of, tree_leaves, tree_map
from memfit.errors import MemoryLimitError
from memfit.foundations import format_bytes
from memfit.hardware import allocations_can_fail, out_of_memory
from memfit.workload import signature, tensors_of

_BLOCK_BYTES = 2**26  # memory is requested in pieces, as an optimizer does

Named = Callable[[Any], Mapping[str, Iterable[torch.Tensor]]]
"""Returns the tensors that a step holds when it begins on a batch, by category."""


class _LiveStorage(weakref.ref[Any]):
    """A storage that is alive, and its bytes."""

    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class CpuLimit(EagerMode):
    """A limit on the CPU: the operator that would exceed it fails before it runs. Enter it around every step.

    It counts the storages of operators' outputs, those of `named`, and operators' workspaces as `workspace_bytes`
    knows them.

    Args:
        limit_bytes: Most bytes held at a time.
        workspace_bytes: Returns the bytes that a call allocates inside, by its `memfit.workload.signatures`.
        as_run: Maps an operator and its arguments, as a mode sees them, to those that run without a mode.

    Attributes:
        peak_bytes: Most bytes held since the mode was last entered.
        has_looked_up: Whether calls since then had unknown bytes, whose computation takes time.
    """

    active: CpuLimit | None = None

    def __init__(
        self,
        limit_bytes: int,
        named: Named,
        workspace_bytes: Callable[[str], int] = lambda text: 0,
        as_run: Callable[[Any, Any, Any], tuple[Any, Any]] = lambda func, args, kwargs: (func, args),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self._named, self._workspace_bytes = named, workspace_bytes
        self._as_run = as_run
        self.has_looked_up = False
        self._held: dict[int, _LiveStorage] = {}
        self._needed: dict[Any, tuple[int, int]] = {}
        self._outer: CpuLimit | None = None
        self._batch: Any = None

    def __call__(self, batch: Any) -> CpuLimit:
        """Return this limit, to be entered around a step on a batch."""
        self._batch = batch
        return self

    def __enter__(self) -> CpuLimit:
        for tensors in self._named(self._batch).values():
            for tensor in tensors:
                self._hold(tensor)
        self.peak_bytes, self.has_looked_up = self.held_bytes, False
        self._outer, CpuLimit.active = CpuLimit.active, self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for tensor in tensors_of(self._batch):  # the batch may live longer, but not on the step's account
            held = self._held.get(storage_key_of(tensor))
            if held is not None:
                self._freed(held)
        CpuLimit.active, self._batch = self._outer, None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def room_bytes(self) -> int:
        """The bytes left below the limit."""
        return self.limit_bytes - self.held_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func, args = self._as_run(func, args, kwargs)
        output_bytes, workspace_bytes = self._need(func, args, kwargs)
        total = self.held_bytes + output_bytes + workspace_bytes
        if total > self.limit_bytes:
            needed_bytes, named = output_bytes + workspace_bytes, self._named(self._batch)
            raise _limit_error(self.limit_bytes, self.held_bytes, needed_bytes, named, str(func))
        self.peak_bytes = max(self.peak_bytes, total)
        out = func(*args, **kwargs)
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            self._hold(tensor)
        return out

    def _hold(self, tensor: Any) -> None:
        """Count a tensor's storage until it is freed."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        storage, key = tensor.untyped_storage(), storage_key_of(tensor)
        if key in self._held:
            return
        held = _LiveStorage(storage, self._freed)
        held.key, held.nbytes = key, storage.nbytes()
        self._held[key] = held
        self.held_bytes += held.nbytes

    def _freed(self, held: Any) -> None:
        if self._held.pop(held.key, None) is not None:
            self.held_bytes -= held.nbytes

    def _need(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        """Return the bytes of a call's output storages and of its workspace."""
        key = _key(func, args, kwargs)
        needed = None if key is None else self._needed.get(key)
        if needed is None:
            self.has_looked_up = True
            needed = _made_bytes(func, args, kwargs), self._workspace_bytes(signature(func, args, kwargs))
            if key is not None:
                self._needed[key] = needed
        return needed


class AcceleratorLimit:
    """A limit on an accelerator, kept by PyTorch's allocator. Enter it around every step.

    It counts the bytes that the allocator reserves, which it takes from the device.

    Raises:
        UsageError: PyTorch can't limit a device of this kind.
    """

    def __init__(self, limit_bytes: int, named: Named, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        self._named, self._fraction = named, hardware.accelerators.MemoryFraction(device)
        self._batch: Any = None
        self._before = 1.0

    def __call__(self, batch: Any) -> AcceleratorLimit:
        """Return this limit, to be entered around a step on a batch."""
        self._batch = batch
        return self

    def __enter__(self) -> AcceleratorLimit:
        self._before = self._fraction.get()
        self._fraction.set(min(self._before, self.limit_bytes / self._fraction.total_bytes))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._fraction.set(self._before)
        batch, self._batch = self._batch, None
        record = None if error is None else out_of_memory(error)
        if record is None or record.kind != "allocator":
            return
        held_bytes, named = hardware.accelerators.allocated_bytes(self.device), self._named(batch)
        raise _limit_error(self.limit_bytes, held_bytes, record.requested_bytes or 0, named, "an operator") from error


def held_by_category(named: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, int]:
    """Return the bytes of tensors' storages by category; a storage in two categories counts in the first."""
    seen: set[int] = set()
    by_category: dict[str, int] = {}
    for category, tensors in named.items():
        storages = {storage_key_of(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
        by_category[category] = sum(nbytes for key, nbytes in storages.items() if key not in seen)
        seen |= storages.keys()
    return by_category


def _limit_error(
    limit_bytes: int, held_bytes: int, requested_bytes: int, named: Mapping[str, Iterable[torch.Tensor]], where: str
) -> MemoryLimitError:
    """Return the error of a step that would exceed its limit, with what it holds by category."""
    by_category = held_by_category(named)
    by_category["activations and temporaries"] = held_bytes - sum(by_category.values())
    ledger = ", ".join(f"{name} {format_bytes(count)}" for name, count in by_category.items() if count)
    return MemoryLimitError(
        f"the step would exceed limit_bytes={limit_bytes} ({format_bytes(limit_bytes)}): {format_bytes(held_bytes)}"
        f" are allocated ({ledger}), and {where} needs {format_bytes(requested_bytes)} more. Nothing was updated."
        " Raise limit_bytes=, or make a plan with a lower budget=",
        limit_bytes=limit_bytes,
        held_bytes=held_bytes,
        requested_bytes=requested_bytes,
        by_category=by_category,
        where=where,
    )


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a key of the arguments that determine a call's bytes; None where they can't be hashed."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.dtype)
        elif isinstance(value, list | tuple):
            parts.append(tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in value))
        elif not isinstance(value, float):  # no size depends on floats, and optimizers pass a new one in each step
            parts.append(value)
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _made_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes of a call's output storages, from a run under fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    detached = [(id(t), t.detach()) for t in arguments]  # else fakes would be made of their gradients too
    try:
        fakes = {name: mode.from_tensor(t, static_shapes=True) for name, t in detached}
        with mode:
            swapped = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
            out = func(*swapped[0], **swapped[1])
    except Exception:  # the shape depends on values: assume an output as large as the largest input
        return max((t.nbytes for t in arguments), default=0)
    before = {storage_key_of(fake) for fake in fakes.values()}
    outputs = {storage_key_of(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
    made = (t for key, t in outputs.items() if key not in before and t.layout is torch.strided)
    return sum(int(t.untyped_storage().nbytes()) for t in made)


def has_room(wanted_bytes: int, device: torch.device) -> bool:
    """Tell whether a device certainly has as many free bytes, if possible without allocating them."""
    if device.type == "cpu":
        if CpuLimit.active is not None and wanted_bytes > CpuLimit.active.room_bytes:
            return False
        return not allocations_can_fail() or _can_take(wanted_bytes, device)
    if hardware.accelerators.cached_bytes(device) > 2 * wanted_bytes:  # twice, since cached memory may be fragmented
        return True
    return _can_take(wanted_bytes, device)


def _can_take(wanted_bytes: int, device: torch.device) -> bool:
    """Tell whether as many bytes can be allocated, by doing so for a moment."""
    blocks = []
    try:
        for start in range(0, wanted_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, wanted_bytes - start)
            blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
    except Exception as e:
        if out_of_memory(e) is None:
            raise
        return False
    return True

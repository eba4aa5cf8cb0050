"""Comparisons of recomputed tensors with the saved ones, bit by bit.

`probing` keeps the saved tensors and collects differences: it takes the memory of the plain step. `checking` keeps
checksums and raises at a difference: it takes time but little memory, for the first step on a plan.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator

import numpy
import torch

from memfit._torch import disable_current_modes, is_fake
from memfit.errors import RecomputationError

Differences = dict[tuple[str, ...], RecomputationError]
"""The first difference in each region, by its modules."""

_differences: Differences | None = None
_is_checking = False
_PIECE_BYTES = 2**22  # size of the pieces in which a non-contiguous tensor is copied for its checksum


@contextlib.contextmanager
def probing() -> Iterator[Differences]:
    """Keep and use saved tensors, and compare recomputed ones with them, until the context is left.

    Forward and backward pass must run within the context. Of fake tensors the shapes are compared. Regions whose
    recomputation differs are in the result; nothing is raised.
    """
    global _differences
    before, _differences = _differences, {}
    try:
        yield _differences
    finally:
        _differences = before


def current() -> Differences | None:
    """Return the differences collected so far; None where nothing is probed."""
    return _differences


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Compare checksums of recomputed and saved tensors, until the context is left.

    Forward and backward pass must run within the context. A difference raises `RecomputationError`; on devices whose
    kernels need not give the same bits twice it is a warning, unless `torch.use_deterministic_algorithms` is on.
    """
    global _is_checking
    before, _is_checking = _is_checking, True
    try:
        yield
    finally:
        _is_checking = before


class Expected:
    """The record of a saved tensor, for comparison with the recomputed one."""

    __slots__ = ("checksum", "is_compared", "original")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Workspaces and running statistics may differ. That of a recurrent kernel is bytes, some of them uninitialized.
        self.is_compared = tensor.dtype is not torch.uint8 or tensor.dim() != 1
        self.original = tensor.detach() if _differences is not None else None  # kept where recomputations are probed
        self.checksum = checksum(tensor) if _is_checking and self.original is None else None

    def difference(self, recomputed: torch.Tensor) -> str | None:
        """Return a description of a recomputed tensor's difference from the saved one; None where there is none."""
        saved = self.original
        if not self.is_compared:
            return None
        if saved is not None:
            if is_fake(saved) or saved.layout is not torch.strided:
                return None
            with torch.no_grad(), disable_current_modes():
                count = int((_bits(recomputed) != _bits(saved)).sum())
            return f"{count} of {saved.numel()} elements of a saved tensor have other values" if count else None
        if self.checksum is None or self.checksum == checksum(recomputed):
            return None
        return f"a saved tensor of shape {list(recomputed.shape)} and {str(recomputed.dtype)[6:]} has other values"


def expected(tensor: torch.Tensor) -> Expected | None:
    """Return the record of a tensor that autograd saves; None where nothing is probed or checked."""
    return Expected(tensor) if is_active() else None


def is_active() -> bool:
    """Tell whether recomputations are probed or checked."""
    return _differences is not None or _is_checking


def report(error: RecomputationError, device: torch.device) -> None:
    """Collect a recomputation's difference in a probe; otherwise raise it, or warn of it."""
    if _differences is not None:
        _differences.setdefault(error.modules, error)
    elif device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        raise error
    else:
        text = f"{error}, unless non-deterministic kernels made the difference: to find out, call"
        warnings.warn(f"{text} torch.use_deterministic_algorithms(True)", RuntimeWarning, stacklevel=2)


def checksum(tensor: torch.Tensor) -> int | None:
    """Return a checksum of a tensor's bits and their order; None where it has no readable data."""
    if is_fake(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    with torch.no_grad(), disable_current_modes():
        bits = tensor.detach()
        bits = torch.view_as_real(bits.resolve_conj()) if bits.is_complex() else bits.resolve_neg()
        return _crc(bits, 0) if bits.device.type == "cpu" else hash(_sums(bits))


def _crc(tensor: torch.Tensor, start: int) -> int:
    """Continue a cyclic redundancy check; a non-contiguous tensor is copied in pieces, by NumPy."""
    if tensor.is_contiguous() or tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        # Not `Tensor.numpy`, after which `fully_shard` can't free the storage: it is not resizable any more.
        values = numpy.from_dlpack(tensor.view(_integer(tensor)))
        return zlib.crc32((values if tensor.is_contiguous() else values.copy(order="C")).data, start)
    for piece in tensor.unbind(0):
        start = _crc(piece, start)
    return start


def _sums(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return sums of a tensor's bits as a nearly square matrix: of its rows and columns, weighted by position."""
    if tensor.numel() == 0:
        return ()
    if not tensor.is_contiguous() and tensor.dim() > 1 and tensor.nbytes > _PIECE_BYTES:
        return tuple(number for piece in tensor.unbind(0) for number in _sums(piece))
    flat = tensor.contiguous().view(-1).view(_integer(tensor))
    width = max(1, int(flat.numel() ** 0.5))
    whole = flat[: flat.numel() // width * width].view(-1, width)
    rest = flat[whole.numel() :]
    sums = [whole.sum(0, dtype=torch.int64), whole.sum(1, dtype=torch.int64), rest.to(torch.int64)]
    weights = (torch.arange(1, len(row) + 1, device=flat.device) for row in sums)
    return tuple(int((row * weight).sum()) for row, weight in zip(sums, weights, strict=True))


def _integer(tensor: torch.Tensor) -> torch.dtype:
    """Return the integer dtype of a tensor's item size, to compare bits: NaN is not equal to itself."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().view(_integer(real))

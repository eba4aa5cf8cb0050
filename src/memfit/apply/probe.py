"""A probe of recomputations: does a region, run again, make what it made before, bit by bit?

`probing` keeps what autograd saves, compares all of it, and tells what differs: it takes the memory of the plain step.
`checking` keeps a checksum of each saved tensor instead, and raises where what is made again has another: it takes no
memory of the device to speak of, and some time, so that it is for the first step on a plan.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import RecomputationError

Differences = dict[tuple[str, ...], RecomputationError]
"""The first difference in each region, by its modules."""

_differences: Differences | None = None
_is_checking = False
_PIECE_BYTES = 2**22  # of what is not contiguous, and is copied for its checksum


@contextlib.contextmanager
def probing() -> Iterator[Differences]:
    """Compare what regions recompute with what they made before, which is kept meanwhile, and used.

    For passes whose forward and backward pass run within the context. Where values are fake, shapes are compared.
    Nothing is raised: regions that do something else when they run again are in the result.
    """
    global _differences
    before, _differences = _differences, {}
    try:
        yield _differences
    finally:
        _differences = before


def current() -> Differences | None:
    """Return where differences are to be noted, None where nothing is probed."""
    return _differences


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Hold the checksums of what is recomputed against those of what was saved.

    For passes whose forward and backward pass run within the context. Where they differ, `RecomputationError` is
    raised; on devices whose kernels need not give the same bits twice, a warning is given instead, unless
    `torch.use_deterministic_algorithms` is on.
    """
    global _is_checking
    before, _is_checking = _is_checking, True
    try:
        yield
    finally:
        _is_checking = before


def difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how the bits of two tensors of one shape and type differ; None where they do not, or can't be read."""
    if is_fake(expected) or expected.layout is not torch.strided:
        return None
    with torch.no_grad(), _disable_current_modes():
        differing = int((_bits(found) != _bits(expected)).sum())
    return f"{differing} of {expected.numel()} elements of a saved tensor have other values" if differing else None


class Saved:
    """What is known of a tensor that autograd saved, to hold against what is made again in its place.

    Args:
        tensor: The tensor; it is not kept where a checksum is enough.

    Attributes:
        original: The tensor itself, where recomputations are probed; otherwise None.
        is_compared: Whether another tensor must be equal to it: some are made again otherwise, and no gradient is.
    """

    __slots__ = ("checksum", "is_compared", "original")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.is_compared = not _is_workspace(tensor)
        self.original = tensor.detach() if _differences is not None else None
        self.checksum = checksum(tensor) if _is_checking and self.original is None else None

    def difference(self, found: torch.Tensor) -> str | None:
        """Return how a tensor differs from the one that was saved; None where it does not."""
        if not self.is_compared:
            return None
        if self.original is not None:
            return difference(found, self.original)
        if self.checksum is None or self.checksum == checksum(found):
            return None
        return f"a saved tensor of shape {list(found.shape)} and {str(found.dtype)[6:]} has other values"


def _is_workspace(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is what a recurrent kernel leaves for its backward pass: bytes, of which some are unset."""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def saved(tensor: torch.Tensor) -> Saved | None:
    """Return what is to be known of a tensor that autograd saves; None where nothing is probed or checked."""
    return None if _differences is None and not _is_checking else Saved(tensor)


def report(error: RecomputationError, device: torch.device) -> None:
    """Note that a recomputation differs where that is probed; otherwise raise it, or warn of it.

    Args:
        error: What differs.
        device: Where it was computed.
    """
    if _differences is not None:
        _differences.setdefault(error.modules, error)
    elif device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        raise error
    else:
        text = f"{error} unless kernels are at fault that need not give the same bits twice: torch.use_deterministic"
        warnings.warn(f"{text}_algorithms(True) tells", RuntimeWarning, stacklevel=2)


def checksum(tensor: torch.Tensor) -> int | None:
    """Return a number that other bits, or the same in another order, would hardly have; None where none can be read."""
    if is_fake(tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    with torch.no_grad(), _disable_current_modes():
        bits = tensor.detach()
        bits = torch.view_as_real(bits.resolve_conj()) if bits.is_complex() else bits.resolve_neg()
        return _crc(bits, 0) if bits.device.type == "cpu" else hash(_sums(bits))


def _crc(tensor: torch.Tensor, start: int) -> int:
    """Go on with a cyclic redundancy check; what is not contiguous is copied in pieces, by NumPy."""
    if tensor.is_contiguous() or tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        values = tensor.view(_integer(tensor)).numpy()
        return zlib.crc32((values if tensor.is_contiguous() else values.copy(order="C")).data, start)
    for piece in tensor.unbind(0):
        start = _crc(piece, start)
    return start


def _sums(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return sums of integers, weighted by their place: of the rows, and of the columns, of a nearly square matrix."""
    if tensor.numel() == 0:
        return ()
    if not tensor.is_contiguous() and tensor.dim() > 1 and tensor.nbytes > _PIECE_BYTES:
        return tuple(number for piece in tensor.unbind(0) for number in _sums(piece))
    flat = tensor.contiguous().view(-1).view(_integer(tensor))
    width = max(1, int(flat.numel() ** 0.5))
    whole = flat[: flat.numel() // width * width].view(-1, width)
    rest = flat[whole.numel() :]
    found = [whole.sum(0, dtype=torch.int64), whole.sum(1, dtype=torch.int64), rest.to(torch.int64)]
    weights = (torch.arange(1, len(one) + 1, device=flat.device) for one in found)
    return tuple(int((one * weight).sum()) for one, weight in zip(found, weights, strict=True))


def _integer(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of integers that shows a tensor's bits: NaN is not equal to itself."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().view(_integer(real))

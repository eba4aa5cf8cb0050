"""PyTorch's own samples of operators (`OpInfo`), with their tensors in other layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture import tensors_in

Layout = Callable[[torch.Tensor], torch.Tensor | None]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_LEFT_OUT = (
    "jiterator",  # for GPUs
    "_refs.",  # decompositions in Python
    "_efficient_attention",
    "_flash_attention",
)


def _transposed(t: torch.Tensor) -> torch.Tensor | None:
    return t.mT.contiguous().mT if t.dim() > 1 else None


def _channels_last(t: torch.Tensor) -> torch.Tensor | None:
    return t.contiguous(memory_format=_CHANNELS_LAST[t.dim()]) if t.dim() in _CHANNELS_LAST else None


def _expanded(t: torch.Tensor) -> torch.Tensor | None:
    return t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] > 1 else None


def _sliced(t: torch.Tensor) -> torch.Tensor | None:
    return torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() else None


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": _transposed,
    "channels last": _channels_last,
    "expanded": _expanded,
    "sliced": _sliced,
}
FIRST = "first transposed"
"""The layout of samples whose first tensor alone is transposed."""


@dataclass
class Sample:
    """A call of an operator.

    Attributes:
        layout: Of its tensors.
        run: Calls it with some arguments.
        arguments: What it is called with.
    """

    layout: str
    run: Callable[[Any], Any]
    arguments: Any


def operators() -> list[Any]:
    """Return PyTorch's descriptions of operators (`OpInfo`) that run on the CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.dtypes and not any(part in op.name for part in _LEFT_OUT)]


def samples(op: Any, dtype: torch.dtype, most: int) -> Iterator[Sample]:
    """Yield samples of an operator, at most some of PyTorch's, each in all layouts that its tensors can have."""
    drawn = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point))
    for sample in drawn[:: -(-len(drawn) // most)] if drawn else []:
        given = (sample.input, tuple(sample.args), dict(sample.kwargs))
        for layout in (*LAYOUTS, FIRST):
            arguments = laid_out(given, layout)
            if arguments is not None:
                yield Sample(layout, functools.partial(_called, op), arguments)


def _called(op: Any, arguments: Any) -> Any:
    given, others, options = arguments
    return op(given, *others, **options)


def laid_out(given: Any, layout: str) -> Any:
    """Return copies of a call's tensors in a layout; None where none of them can have it, and it is not the first."""
    change = LAYOUTS["transposed" if layout == FIRST else layout]
    tensors = [t for t in tensors_in(given) if t.layout is torch.strided]
    changed = False

    def copied(t: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        with torch.no_grad():
            own = t.detach()
            wanted = t.layout is torch.strided and (layout != FIRST or t is tensors[0])
            new = change(own) if wanted else None
            changed = changed or new is not None
            new = own.clone() if new is None or new.data_ptr() == own.data_ptr() else new
        return new.requires_grad_(t.requires_grad)

    arguments = mapped(copied, given)
    alone = layout == FIRST and len(tensors) < 2
    return arguments if layout == "contiguous" or (changed and not alone) else None


def dtype_of(op: Any) -> torch.dtype:
    """Return the dtype of an operator's samples: float32 where it takes that."""
    wanted = (torch.float32, torch.int64, torch.bool, torch.complex64)
    found: torch.dtype = next(dtype for dtype in (*wanted, *sorted(op.dtypes, key=str)) if dtype in op.dtypes)
    return found


def backward(out: Any, arguments: Any, layout: str) -> list[torch.Tensor | None]:
    """Run the backward pass of a call, twice, with gradients like its outputs and, at first, like those of a sum.

    Returns the gradients of both.
    """
    outputs = [t for t in tensors_in(out) if t.requires_grad]
    inputs = [t for t in tensors_in(arguments) if t.requires_grad]
    if not outputs or not inputs:
        return []
    found: list[torch.Tensor | None] = []
    for kind in ("expanded", "contiguous"):
        given = [gradient(t, kind) for t in outputs]
        again = kind != "contiguous"
        found += torch.autograd.grad(outputs, inputs, given, retain_graph=again, allow_unused=True)
    return found


def gradient(output: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the gradient of an output: of its layout, or one number that is expanded."""
    with torch.no_grad():
        if kind == "expanded":
            return torch.ones((), dtype=output.dtype).expand(output.shape)
        return torch.ones(output.shape, dtype=output.dtype)


def mapped(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Return arguments with each tensor changed by a function."""
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: mapped(function, value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [mapped(function, value) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return values

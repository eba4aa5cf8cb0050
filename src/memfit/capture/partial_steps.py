"""Parts of a batch that captures run: two microbatches, or all where they differ, with the whole batch held."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

import torch

from memfit.capture.fake_workload import real_copy
from memfit.errors import CaptureError
from memfit.ir.trace import Trace
from memfit.workload import Workload, part_of, samples_of, tensors_of

_NUMBERS = re.compile(r"-?\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)")  # such as weights of losses, which change no size
_SIZED = re.compile(r'(",|"l":)\[\d')  # a tensor with dimensions, or a list of sizes
_MOST_OPERATORS = 20_000  # run for one trace, in some fifteen seconds
MOST_MICROBATCHES = 32  # run for one trace


def real_part(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return a copy of a workload with data, and all microbatches of its batch if they are few, else two."""
    size = samples_of(workload)
    few = -(-size // (microbatch_size or size)) <= MOST_MICROBATCHES
    return unwrapped(real_copy(workload if few else shortened(workload, microbatch_size)))


def shortened(workload: Workload, microbatch_size: int | None) -> Workload:
    """Return the workload with at most two microbatches in its batch, as views: the storages keep their size."""
    size = samples_of(workload)
    two = min(size, 2 * (microbatch_size or size))
    if two == size:
        return workload
    start = _heaviest(workload, microbatch_size or size, size)
    batch = part_of(workload, workload.batch, start, start + two)
    counted = workload.batch_size if callable(workload.batch_size) or workload.batch_size is None else two
    return dataclasses.replace(workload, batch=_Part(batch, workload.batch), batch_size=counted)


@dataclasses.dataclass
class _Part:
    """A part of a batch to run, and the whole batch, whose memory is held meanwhile."""

    part: Any
    whole: Any


def unwrapped(copied: Workload) -> Workload:
    """Return a copied workload with the batch's part as its `batch`, and the whole batch as its `batches`."""
    if isinstance(copied.batch, _Part):
        return dataclasses.replace(copied, batch=copied.batch.part, batches=[copied.batch.whole])
    return dataclasses.replace(copied, batches=None)


def _heaviest(workload: Workload, microbatch_size: int, size: int) -> int:
    """Return the first sample of two microbatches of which the second has the most elements."""
    if workload.split is None and len({t.shape[0] for t in tensors_of(workload.batch) if t.dim()}) == 1:
        return 0
    parts = [
        part_of(workload, workload.batch, start, min(start + microbatch_size, size))
        for start in range(0, size, microbatch_size)
    ]
    elements = [sum(t.numel() for t in tensors_of(part)) for part in parts]
    later = elements[1 : size // microbatch_size]  # their gradients are added to earlier ones
    return microbatch_size * later.index(max(later))


class EveryMicrobatch(enum.Enum):
    """Whether the two microbatches of a trace stand for the others."""

    NOT_NEEDED = enum.auto()
    NEEDED = enum.auto()
    TOO_MANY = enum.auto()


def every_microbatch(trace: Trace, may_differ: bool) -> EveryMicrobatch:
    """Return whether all microbatches must run, since the two of a trace don't stand for the others.

    They don't where they run different operators, as where lengths or values decide, where others may differ, and where
    sparse gradients are added up, which grow with each microbatch.

    Raises:
        CaptureError: The microbatches add up sparse gradients, and are too many to run.
    """
    if trace.microbatches == trace.scale_microbatches:
        return EveryMicrobatch.NOT_NEEDED
    operators = len(trace.ops) * trace.scale_microbatches // trace.microbatches
    adding = (op for op in trace.ops if op.phase == "backward" and op.microbatch and op.name == "aten.add_.Tensor")
    if any('"args":[{"s":' in trace.signatures[op.signature] for op in adding):  # sparse gradients
        if operators > _MOST_OPERATORS:
            raise CaptureError(
                f"{trace.scale_microbatches:,} microbatches add up sparse gradients, and the sum grows with each."
                f" They run {operators:,} operators; a capture runs at most {_MOST_OPERATORS:,}. Give a larger"
                " microbatch_size="
            )
        return EveryMicrobatch.NEEDED
    differ = _run_other_operators(trace)
    if not (differ or may_differ):
        return EveryMicrobatch.NOT_NEEDED
    if trace.scale_microbatches <= MOST_MICROBATCHES and operators <= _MOST_OPERATORS:
        return EveryMicrobatch.NEEDED
    return EveryMicrobatch.TOO_MANY if differ else EveryMicrobatch.NOT_NEEDED


def _run_other_operators(trace: Trace) -> bool:
    """Tell whether the two forward passes differ in more than numbers, and in more than operators on scalars."""
    texts = [_NUMBERS.sub("", text) if _SIZED.search(text) else "" for text in trace.signatures]
    forward: list[list[str]] = [[], []]
    for op in trace.ops:
        if op.phase == "forward" and texts[op.signature]:
            forward[op.microbatch].append(texts[op.signature])
    return forward[0] != forward[1]


def inputs_of(copied: Workload) -> list[torch.Tensor]:
    """Return the tensors of a copy's batch, and of the whole batch that it is a part of."""
    return tensors_of([copied.batch, copied.batches])

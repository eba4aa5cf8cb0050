"""Padding: how much of a batch's tokens count for nothing, what sorting its samples would leave, and packed rows.

Lengths are read from the batch itself: from an `attention_mask` of samples × tokens, of zeros and ones as tokenizers
make it; or, where there is none, from `labels` that end in ignored targets (-100) beside `input_ids` that end in one
and the same token. Ignored targets before the last one that counts, as those of a prompt, are no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memfit._torch import FakeTensor
from memfit.errors import WorkloadError

_MASK, _LABELS, _IDS, _POSITIONS = "attention_mask", "labels", "input_ids", "position_ids"
_IGNORED = -100  # the target that losses leave out, by PyTorch's and transformers' default
_WORTH_TELLING = 0.2  # of the tokens
_PARTS = 4  # into which a note cuts a batch of sorted samples, at most


class Padding(NamedTuple):
    """The padding of a batch.

    Attributes:
        lengths: Tokens of each sample from the first one that counts to the last.
        tokens: Tokens of each sample with its padding.
        source: The entry of the batch that tells so.
    """

    lengths: tuple[int, ...]
    tokens: int
    source: str

    @property
    def total(self) -> int:
        """All tokens of the batch, with padding."""
        return self.tokens * len(self.lengths)

    @property
    def share(self) -> float:
        """The share of the tokens that are padding."""
        return 1 - sum(self.lengths) / self.total

    def sorted_tokens(self, samples: int) -> int:
        """Return the tokens of the batch if its samples were sorted, and each few of them cut to their longest."""
        lengths = sorted(self.lengths, reverse=True)
        parts = (lengths[start : start + samples] for start in range(0, len(lengths), samples))
        return sum(part[0] * len(part) for part in parts)


def padding_of(batch: Any) -> Padding | None:
    """Return the padding of a batch; None where nothing in it tells, or where it has no data."""
    if not isinstance(batch, Mapping):
        return None
    if (mask := _table(batch, _MASK)) is not None:
        return Padding(_spans(mask != 0), mask.shape[1], _MASK)
    labels, ids = _table(batch, _LABELS), _table(batch, _IDS)
    if labels is None or ids is None or labels.shape != ids.shape:
        return None
    ends = torch.tensor([_last(row) for row in labels != _IGNORED]).unsqueeze(1)
    filler = ids[torch.arange(ids.shape[1]) >= ends]
    is_filled = filler.numel() > 0 and bool((filler == filler[0]).all())
    return Padding(tuple(map(int, ends)), ids.shape[1], _LABELS) if is_filled else None


def padding_note(batch: Any) -> str | None:
    """Return a note on a batch of which much is padding; None for others."""
    found = padding_of(batch)
    if found is None or found.share < _WORTH_TELLING or not any(found.lengths):
        return None
    count, used = len(found.lengths), sum(found.lengths)
    samples = -(-count // _PARTS)
    parts = -(-count // samples)
    saved = f"cut to their longest, {found.sorted_tokens(count):,} would be left"
    if parts > 1:
        saved += (
            f"; sorted by length into {parts} microbatches of {samples}, each cut to its longest,"
            f" {found.sorted_tokens(samples):,}"
        )
    return (
        f"{found.share:.0%} of the batch's {found.total:,} tokens are padding (by its {found.source}): the step"
        f" computes and holds them like others. With all samples {saved}; packed one after the other, {used:,}."
        " Workload(split=memfit.tools.ByLength()) sorts and cuts microbatches; memfit.tools.Packed().workload(workload)"
        " packs, for models that keep samples apart by position_ids"
    )


def packed(
    batch: Any, *, rows: int = 1, multiple_of: int = 1, entry: str = _MASK, shifts: bool = True
) -> dict[Any, Any]:
    """Return a padded batch as rows of samples that follow one another, as `memfit.tools.Packed` describes.

    Raises:
        WorkloadError: Some tensor of the batch is none of samples × tokens, or no token counts.
    """
    mask = _table(batch, entry) if isinstance(batch, Mapping) else None
    if mask is None:
        raise WorkloadError(
            f"the batch can't be packed: it has no tensor {entry!r} of samples × tokens, of whole numbers, with data."
            " Give a padded batch with it, or name another entry with Packed(entry=...)"
        )
    counts, samples = mask != 0, range(len(mask))
    starts, lengths = [_first(row) for row in counts], _spans(counts)
    if not any(lengths) or sum(lengths) != int(counts.sum()):
        why = f"{entry!r} has zeros between tokens that count" if any(lengths) else f"by its {entry!r} no token counts"
        raise WorkloadError(f"the batch can't be packed: {why}. Leave this batch out, or run it as it is")
    tables = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    for name, value in tables.items():
        if value.shape != mask.shape:
            raise WorkloadError(
                f"the batch can't be packed: its {name!r} has the shape {tuple(value.shape)}, and its {entry!r}"
                f" {tuple(mask.shape)}. Packed rows have no place for a value a sample: take {name!r} out of the batch,"
                " or sort samples by length with Workload(split=memfit.tools.ByLength())"
            )
    placed = _rows([sample for sample in samples if lengths[sample]], lengths, rows)
    longest = max(sum(lengths[sample] for sample in row) for row in placed)
    width, tokens = -(-longest // multiple_of) * multiple_of, mask.shape[1]
    places = torch.full((len(placed), width), -1)  # in the batch, its samples joined; -1 for filler
    positions = torch.zeros_like(places)
    for number, row in enumerate(placed):
        used = 0
        for sample in row:
            inside = torch.arange(lengths[sample])
            places[number, used : used + len(inside)] = sample * tokens + starts[sample] + inside
            positions[number, used : used + len(inside)] = inside
            used += len(inside)
        positions[number, used:] = torch.arange(width - used) % tokens  # samples of their own, no longer than others
    places, positions = (tensor.to(batch[entry].device) for tensor in (places, positions))

    def joined(name: Any, table: torch.Tensor) -> torch.Tensor:
        found = table.flatten()[places.clamp(min=0)]
        if name != _LABELS:
            return torch.where(places < 0, positions if name == _POSITIONS else 0, found).to(table.dtype)
        return found.masked_fill((places < 0) | (positions == 0) & shifts, _IGNORED)

    rest = {name: value for name, value in batch.items() if name not in tables}
    return {_POSITIONS: positions} | rest | {n: joined(n, table) for n, table in tables.items() if n != entry}


def _rows(samples: list[int], lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Return the samples of each row, in their order: the longest first, each goes into the row with fewest tokens."""
    placed: list[list[int]] = [[] for _ in range(min(rows, len(samples)))]
    for sample in sorted(samples, key=lambda sample: -lengths[sample]):
        min(placed, key=lambda row: sum(lengths[other] for other in row)).append(sample)
    return [sorted(row) for row in placed]


def _table(batch: Mapping[Any, Any], name: str) -> torch.Tensor | None:
    """Return an entry of samples × tokens, of whole numbers or booleans, on the CPU; None where there is none."""
    found = batch.get(name)
    if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor) or found.device.type == "meta":
        return None
    is_table = found.dim() == 2 and found.numel() > 0 and not found.is_floating_point() and not found.is_complex()
    return found.detach().cpu() if is_table and found.layout is torch.strided else None


def _spans(counts: torch.Tensor) -> tuple[int, ...]:
    """Return the tokens of each sample from the first one that counts to the last."""
    return tuple(_last(row) - _first(row) for row in counts)


def _first(row: torch.Tensor) -> int:
    places = row.nonzero()
    return int(places[0]) if len(places) else 0


def _last(row: torch.Tensor) -> int:
    places = row.nonzero()
    return int(places[-1]) + 1 if len(places) else 0

"""Padding: how much of a batch's tokens count for nothing, and what sorting or packing its samples would leave.

Lengths are read from the batch itself: from an `attention_mask` of samples × tokens, of zeros and ones as tokenizers
make it; or, where there is none, from `labels` that end in ignored targets (-100) beside `input_ids` that end in one
and the same token. Ignored targets before the last one that counts, as those of a prompt, are no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from memfit._torch import FakeTensor

_MASK, _LABELS, _IDS = "attention_mask", "labels", "input_ids"
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
        " Workload(split=memfit.tools.ByLength()) sorts and cuts microbatches; transformers.DataCollatorWithFlattening"
        " packs, for models that take position_ids"
    )


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

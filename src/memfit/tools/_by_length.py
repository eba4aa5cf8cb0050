"""Microbatches of samples sorted by length, each without the padding that all of its samples have."""

from __future__ import annotations

from typing import Any

import torch

from memfit.errors import WorkloadError
from memfit.foundations import public
from memfit.workload import map_tensors, take


class ByLength:
    """A `Workload.split` that sorts the samples of a batch by length, and cuts each microbatch to its longest.

    Samples are padded at their end. The first microbatch has the longest samples, so that memory is asked for once.
    Microbatches are those of the batch in another order: gradients are equal to rounding where the loss does not depend
    on padding, and is a mean over samples or `(sum, count)`.

    Args:
        entry: The entry of the batch that tells padding: a tensor of samples × tokens.
        padding: What it has there: 0 for masks, -100 for labels, the padding's id for tokens.
    """

    def __init__(self, entry: str = "attention_mask", padding: int = 0) -> None:
        self.entry, self.padding = entry, padding

    @public
    def __call__(self, batch: Any, start: int, stop: int) -> Any:
        """Return the samples from `start` up to `stop` of a batch in the order of their lengths, the longest first.

        Raises:
            WorkloadError: The batch has no such entry, or tensors whose padding can't be cut.
        """
        table = self._table(batch)
        places = torch.arange(1, table.shape[1] + 1, device=table.device)
        lengths = ((table != self.padding) * places).amax(1).tolist()
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])[start:stop]
        longest = max(1, lengths[order[0]])

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:1] != table.shape[:1]:
                return tensor
            if table.shape[1] in tensor.shape[2:]:
                raise WorkloadError(
                    f"ByLength can't cut the padding of a tensor of shape {tuple(tensor.shape)}: it has the batch's"
                    f" {table.shape[1]} tokens in another dimension than the second. Leave Workload.split out, or make"
                    " that tensor in Workload.loss_fn"
                )
            return tensor[:, :longest] if tensor.shape[:2] == table.shape else tensor

        return take(map_tensors(cut, batch), order)

    def _table(self, batch: Any) -> torch.Tensor:
        found = batch[self.entry] if isinstance(batch, dict) and self.entry in batch else None
        if not isinstance(found, torch.Tensor) or found.dim() != 2:
            raise WorkloadError(
                f"Workload.batch has no tensor {self.entry!r} of samples × tokens, by which ByLength sorts: name one"
                " with ByLength(entry=...), or leave Workload.split out"
            )
        return found

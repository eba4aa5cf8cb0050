"""The ranks of a step, played by one process one after the other: what their step is to give."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.ranks.group import drawing_as, mean_of, message_of, share_of
from memfit.ranks.one_process import Number, Share, SingleProcess
from memfit.workload import Workload


class PlayedRank(SingleProcess):
    """A rank that a process plays.

    It needs what the others send. So all are played twice where a count is divided by, and the second time each is
    given the messages of the first.

    Args:
        messages: Of all ranks, by rank, from when they were played before; None the first time.

    Attributes:
        sent: Its messages.
        divisor: The count that it divided by before all counts were known; None of means.
        totals: The loss and the count of all ranks, once it has run.
    """

    def __init__(self, rank: int, size: int, messages: list[list[torch.Tensor]] | None) -> None:
        self.rank, self.size, self._messages = rank, size, messages
        self.sent: list[torch.Tensor] = []
        self.divisor: torch.Tensor | None = None
        self.totals: list[torch.Tensor] = []

    def share(self, workload: Workload, batch: Any) -> Share:
        return share_of(workload, batch, self.rank, self.size)

    def drawing(self) -> AbstractContextManager[object]:
        return drawing_as(self.rank)

    def means(self, values: list[Number]) -> list[Number]:
        self.totals = list(self._mean(values).unbind())
        # Gradients are corrected for their count once the ranks' are added up, as the engines do: not here.
        return list(self.totals) if self.divisor is None else [self.totals[0], self.divisor.double()]

    def mean(self, value: Number) -> Number:
        self.divisor = self._mean([value])[0].float()
        return self.divisor

    def _mean(self, values: list[Number]) -> torch.Tensor:
        own = message_of(values, torch.device("cpu"))
        number = len(self.sent)
        self.sent.append(own)
        return own if self._messages is None else mean_of([of_rank[number] for of_rank in self._messages])

"""Batches that a plan was not made for: held against its promise before a step runs on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.errors import MemfitError, UsageError
from memfit.extent import Extent, covers, difference_text, extent_of, grown, looked_ahead
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers, Plan, Prediction
from memfit.planner.captures import capture_levers
from memfit.planner.confirmation import first_line
from memfit.planner.prediction import costs_of, predict
from memfit.sharding.one_rank import of_engine
from memfit.units import format_bytes
from memfit.workload import Workload, samples_of, tensors_of

_MOST = 32
"""Most larger extents that are remembered; the smallest are forgotten first."""


class Held(NamedTuple):
    """An extent that a step holds within its budget, and what the step takes on it."""

    extent: Extent
    prediction: Prediction


class Admission:
    """Predicts a planned step on each batch that is larger than those before, and refuses what its budget can't hold.

    Where batches grow a second time, sizes that grew are looked ahead (`extent.GROWTH`), so that a run makes few
    captures, however its batches grow.

    Args:
        workload: What the plan was made for, with its batch.
        lifted: Makes the context in which the model is as the user made it.
        note: Takes the kind and the text of an event.
        advice: What to do about a batch that does not fit, in the words of the interface.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        lifted: Callable[[], AbstractContextManager[object]],
        note: Callable[[str, str], object],
        advice: str,
    ) -> None:
        self._workload, self._plan = workload, plan
        self._lifted, self._note, self._advice = lifted, note, advice
        self._planned = Held(extent_of(workload.batch), plan.predicted)
        self._levers = plan.levers
        self._held: list[Held] = []

    def __call__(self, batch: Any, levers: Levers, prediction: Prediction) -> Prediction:
        """Return what the step is predicted to take on a batch: as planned, for batches within the planned one.

        Args:
            levers: What the step runs under now.
            prediction: What it is predicted to take on the planned batch.

        Raises:
            UsageError: The batch is larger than the planned one, and the step would exceed the budget on it, or can't
                be predicted on it.
        """
        extent = extent_of(batch)
        if covers(self._planned.extent, extent):
            return prediction
        if levers != self._levers:
            self._levers, self._held = levers, []
        held = next((held for held in self._held if covers(held.extent, extent)), None)
        return (held or self._admitted(batch, extent)).prediction

    def _admitted(self, batch: Any, extent: Extent) -> Held:
        difference = difference_text(extent, self._planned.extent)
        held = None
        if self._held:
            try:
                ahead = grown(batch, looked_ahead(self._held[-1].extent, extent))
                held = self._if_fits(ahead)
            except (MemfitError, RuntimeError, ValueError):  # a batch that was made up may be one that can't be
                held = None
        try:
            held = held or self._predicted(batch)
        except MemfitError as e:
            raise UsageError(
                f"a batch is larger than the plan's ({difference}), and memfit can't predict its peak"
                f" ({first_line(e)}). {self._advice}"
            ) from e
        needed, budget = held.prediction.peak_upper_bytes, self._plan.budget_bytes
        if needed > budget:
            raise UsageError(
                f"a batch is larger than the plan's ({difference}): the step would need"
                f" {format_bytes(needed)} for it, above the budget of {format_bytes(budget)}. Nothing was"
                f" run. {self._advice}"
            )
        self._held = [*self._held, held][-_MOST:]
        self._note(
            "larger batch",
            f"a batch is larger than the plan's ({difference}): the step needs"
            f" {format_bytes(held.prediction.peak_bytes)} for it, as predicted, within the budget of"
            f" {format_bytes(budget)}",
        )
        return held

    def _if_fits(self, batch: Any) -> Held | None:
        held = self._predicted(batch)
        return held if held.prediction.peak_upper_bytes <= self._plan.budget_bytes else None

    def _predicted(self, batch: Any) -> Held:
        workload, levers = dataclasses.replace(self._workload, batch=batch), self._levers
        if levers.microbatch_size >= self._plan.batch_size:  # what is not cut stays whole
            levers = replace(levers, microbatch_size=samples_of(workload))
        device = find_device(self._plan.device)
        with self._lifted():
            trace = of_engine(capture_levers(workload, levers, device), self._plan.engine)
        prediction, _ = predict(trace, costs_of([trace], device), device)
        kept_bytes = sum(t.nbytes for t in tensors_of(self._workload.batch))  # beside the batch that is run
        with_kept = {
            name: value + kept_bytes if (value := getattr(prediction, name)) is not None else None
            for name in ("peak_bytes", "peak_upper_bytes", "peak_reserved_bytes")
        }
        return Held(extent_of(batch), replace(prediction, **with_kept))

"""Batches that a plan was not made for: larger ones are held against its promise before a step runs on them, and those
whose shapes vary are each run with the fastest plan that fits them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec.structs import replace

from memfit import hardware
from memfit.cost import with_workspaces
from memfit.errors import MemfitError, UsageError
from memfit.foundations import format_bytes
from memfit.hardware import find_device
from memfit.ir import Plan, Prediction, simulate, unfused
from memfit.levers import Circumstance, LeversOn, Switch, candidates_of, check_lever_names, lever_names, lowered
from memfit.planner import Captures, costs_of, first_line, predicted_under
from memfit.solver import Controller, ExpectedStep
from memfit.training import CpuLimit, Recovery, Snapshots, StepResult, device_of
from memfit.workload import (
    Extent,
    Workload,
    map_tensors,
    samples_of,
    tensors_of,
)

ANCHORS = (0.0, 0.2, 0.45, 0.7, 1.0)
"""Places between the smallest shapes (0) and the largest (1) at which the step is captured; others are interpolated."""
BUCKETS = 8
"""Equal parts of these places, for which times are learned apart."""
_SMALLEST = 16  # of the largest size: the smallest that is captured

_MOST_ADMITTED = 32  # larger extents that are remembered; the smallest are forgotten first

Shapes = tuple[tuple[int, ...], ...]


class Admission:
    """Predicts a planned step on each batch that is larger than those before, and refuses what its budget can't hold.

    Where batches grow a second time, sizes that grew are looked ahead (`extent.GROWTH`), so that a run makes few
    captures, however its batches grow. The step tells what it is predicted to take on each.
    """

    def __init__(self, switch: Switch, plan: Plan, workload: Workload) -> None:
        self._switch, self._plan, self._workload = switch, plan, workload
        self._planned, self._levers = Extent.of(workload.batch), plan.levers
        self._admitted: list[tuple[Extent, Prediction]] = []
        self._promised = self._told = switch.step.options.prediction
        self._advice = (
            f"Make the plan with Workload.batch as large as any batch ({switch.levers.microbatch_size} of"
            f" {plan.batch_size} samples are run at once), give smaller batches, or raise budget="
        )

    def __call__(self, batch: Any) -> None:
        """Admit a batch; refuse a larger one on which the step would exceed the budget, or can't be predicted."""
        extent, step, sharding = Extent.of(batch), self._switch.step, self._plan.levers.sharding
        is_larger = not self._planned.covers(extent)
        if sharding is not None:
            if is_larger:
                raise UsageError(
                    f"a batch is larger than the plan's ({extent.difference_text(self._planned)}), and memfit"
                    f" can't predict its peak on each of {sharding.world_size} ranks during training."
                    f" {self._advice}"
                )
            return
        if step.options.prediction is not self._told:  # a lower plan, after a step ran out of memory
            self._promised = step.options.prediction
        found = self._promised or self._plan.predicted
        if is_larger:
            if self._switch.levers != self._levers:
                self._levers, self._admitted = self._switch.levers, []
            known = next((prediction for held, prediction in self._admitted if held.covers(extent)), None)
            found = known or self._admit(batch, extent)
        self._told = found
        if found is not step.options.prediction:
            step.change(prediction=found, predicted_peak_bytes=found.peak_bytes)

    def _admit(self, batch: Any, extent: Extent) -> Prediction:
        difference, budget = extent.difference_text(self._planned), self._plan.budget_bytes
        found = None
        if self._admitted:
            with contextlib.suppress(MemfitError, RuntimeError, ValueError):  # one that was made up may not run
                larger = extent.looked_ahead(self._admitted[-1][0]).filled(batch)
                found = Extent.of(larger), self._predicted(larger)
        if found is None or found[1].peak_upper_bytes > budget:
            try:
                found = extent, self._predicted(batch)
            except MemfitError as e:
                raise UsageError(
                    f"a batch is larger than the plan's ({difference}), and memfit can't predict its peak"
                    f" ({first_line(e)}). {self._advice}"
                ) from e
        prediction = found[1]
        if (needed := prediction.peak_upper_bytes) > budget:
            raise UsageError(
                f"a batch is larger than the plan's ({difference}): the step would need"
                f" {format_bytes(needed)} for it, above the budget of {format_bytes(budget)}. Nothing was"
                f" run. {self._advice}"
            )
        self._admitted = [*self._admitted, found][-_MOST_ADMITTED:]
        self._switch.step.note(
            "larger batch",
            f"a batch is larger than the plan's ({difference}): the step needs"
            f" {format_bytes(prediction.peak_bytes)} for it, as predicted, within the budget of"
            f" {format_bytes(budget)}",
        )
        return prediction

    def _predicted(self, batch: Any) -> Prediction:
        workload, levers = dataclasses.replace(self._workload, batch=batch), self._levers
        if levers.microbatch_size >= self._plan.batch_size:  # what is not cut stays whole
            levers = replace(levers, microbatch_size=samples_of(workload))
        with self._switch.lifted():
            prediction, _ = predicted_under(self._plan, workload, levers)
        kept_bytes = sum(t.nbytes for t in tensors_of(self._workload.batch))  # beside the batch that is run
        with_kept = {
            name: value + kept_bytes if (value := getattr(prediction, name)) is not None else None
            for name in ("peak_bytes", "peak_upper_bytes", "peak_reserved_bytes")
        }
        return replace(prediction, **with_kept)


class ShapeInterpolation:
    """A linear interpolation between small shapes and the largest, on which batches are placed.

    `smaller` are shapes that are smaller in the dimensions that vary.
    """

    def __init__(self, largest: Shapes, smaller: Shapes) -> None:
        self.largest = largest
        spans = {
            (i, d): (small, large)
            for i, (one, other) in enumerate(zip(smaller, largest, strict=True))
            for d, (small, large) in enumerate(zip(one, other, strict=True))
            if small != large
        }
        least = max((max(1, -(-large // _SMALLEST)) - large) / (large - small) for small, large in spans.values())
        self.ends = {at: (round(large + least * (large - small)), large) for at, (small, large) in spans.items()}

    def covers(self, shapes: Shapes) -> bool:
        """Tell whether only dimensions vary that are interpolated."""
        return all(at in self.ends for at in varying(self.largest, shapes))

    def place(self, shapes: Shapes) -> float:
        """Return the least place at which every dimension is at least as large, from 0 to 1."""
        places = [(shapes[i][d] - low) / (high - low) for (i, d), (low, high) in self.ends.items() if high > low]
        return min(1.0, max(0.0, *places))

    def batch_at(self, batch: Any, place: float) -> Any:
        """Return the largest batch, cut to the shapes at a place."""
        sizes = {at: round(low + place * (high - low)) for at, (low, high) in self.ends.items()}
        index = iter(range(len(self.largest)))

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            i = next(index)
            for d in range(leaf.dim()):
                leaf = leaf.narrow(d, 0, sizes.get((i, d), leaf.shape[d]))
            return leaf.clone()

        return map_tensors(cut, batch)


class Adaptive(Recovery):
    """Runs every batch with a plan of its own, of those on a plan's frontier.

    Attributes:
        candidates: The plans.
        taken: How often each was run, by bucket and position.
    """

    def __init__(self, switch: Switch, plan: Plan, workload: Workload, snapshots: Snapshots | None = None) -> None:
        check_lever_names({Circumstance.ADAPTING} | lever_names(LeversOn(plan.levers, plan.batch_size)))
        super().__init__(switch.step, plan, self._next, snapshots=snapshots)
        self.candidates = candidates_of(plan)
        self.taken: Counter[tuple[int, int]] = Counter()
        self._base, self._switch, self._workload, self._device = plan, switch, workload, find_device(plan.device)
        self._place_of_step = device_of(switch.step)
        self._largest = shapes_of(self._workload.batch)
        self._between: ShapeInterpolation | None = None
        self._at: list[list[ExpectedStep]] = []
        peak_error = plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes - 1
        self.controller = Controller(plan.budget_bytes, peak_error)

    def __call__(self, run: Callable[[Any], StepResult], batch: Any) -> StepResult:
        """Run a batch with the plan that is chosen for it."""
        place = self._place(batch)
        self._bucket = min(BUCKETS - 1, int(place * BUCKETS))
        self._expected = self.expected_at(place)
        self._take(self._chosen())
        hardware.accelerators.reset_peaks(self._place_of_step)
        try:
            result = super().__call__(run, batch)
        finally:
            self.plan = self._base
        limit = self.step.limit if isinstance(self.step.limit, CpuLimit) else None
        seconds = None if limit and limit.has_looked_up else result.seconds
        peaks = hardware.accelerators.peaks(self._place_of_step)
        peak_bytes = peaks.allocated_bytes if peaks is not None else limit.peak_bytes if limit else None
        self.controller.learn(self._bucket, self._arm, self._expected[self._arm], seconds, peak_bytes)
        self.taken[self._bucket, self._arm] += 1
        return result

    def __str__(self) -> str:
        lines = [f"{'plan':>6}{'peak at the largest':>22}   batches, from the smallest shapes to the largest"]
        for arm, candidate in enumerate(self.candidates):
            counts = "".join(f"{self.taken[bucket, arm]:7}" for bucket in range(BUCKETS))
            lines.append(f"{arm:6}{format_bytes(candidate.peak_bytes):>22}   {counts}")
        return "\n".join(lines)

    def expected_at(self, place: float) -> list[ExpectedStep]:
        """Return what each plan is predicted to take for shapes at a place, interpolated between those captured.

        Times are those for the largest shapes: which plan is faster, and by how much, is what counts.

        What a storage takes grows with the product of some dimensions, and a peak is the largest of sums of storages:
        convex, so that the straight line between two captured peaks is above those in between.
        """
        if self._between is None or place == 1.0:
            return self._at_largest
        high = next(i for i, anchor in enumerate(ANCHORS) if place <= anchor) or 1
        start, stop = ANCHORS[high - 1], ANCHORS[high]
        share = (place - start) / (stop - start)
        pairs = zip(self._at[high - 1], self._at[high], strict=True)
        return [ExpectedStep(a.peak_bytes + share * (b.peak_bytes - a.peak_bytes), a.seconds) for a, b in pairs]

    @functools.cached_property
    def _at_largest(self) -> list[ExpectedStep]:
        return self._anchor(self._workload.batch)

    def _place(self, batch: Any) -> float:
        """Return the place of a batch between the smallest and the largest shapes, from 0 to 1."""
        shapes = shapes_of(batch)
        if shapes == self._largest:
            return 1.0
        largest = self._largest
        same = len(shapes) == len(largest) and all(len(a) == len(b) for a, b in zip(shapes, largest, strict=True))
        if not same or any(shapes[i][d] > largest[i][d] for i, d in varying(shapes, largest)):
            raise UsageError(
                f"a batch with tensors of shapes {list(shapes)} is not within the largest, Workload.batch with"
                f" {list(largest)}: make the plan with Workload.batch as large as any batch"
            )
        if self._between is None or not self._between.covers(shapes):
            at_largest = self._at_largest
            self._between = ShapeInterpolation(largest, shapes)
            smaller = [self._between.batch_at(self._workload.batch, place) for place in ANCHORS[:-1]]
            self._at = [*map(self._anchor, smaller), at_largest]
        return self._between.place(shapes)

    def _anchor(self, batch: Any) -> list[ExpectedStep]:
        """Predict every plan for a batch, from a capture for each choice of its levers but regions."""
        workload = dataclasses.replace(self._workload, batch=batch)
        bare = [replace(candidate.levers, regions=()) for candidate in self.candidates]
        with self._switch.lifted():
            captures = Captures(workload, self._device)
            traces = {levers: captures(levers) for levers in dict.fromkeys(bare)}
        if batch is self._workload.batch or self._device.kind != "cpu":
            self._costs = costs_of(traces.values(), self._device)
        else:
            self._costs = with_workspaces(self._costs, map(unfused, traces.values()))
        kept_bytes = sum(t.nbytes for t in tensors_of(self._workload.batch))  # beside the batch that is run
        found = []
        for levers, candidate in zip(bare, self.candidates, strict=True):
            timeline = simulate(traces[levers], self._costs, candidate.levers.regions)
            found.append(ExpectedStep(timeline.peak_bytes + kept_bytes, candidate.step_seconds))
        return found

    def _take(self, arm: int) -> Plan:
        self._arm, candidate = arm, self.candidates[arm]
        self._switch.to(candidate.levers)
        peak_bytes = int(self._expected[self._arm].peak_bytes)
        self.plan = lowered(self._base, replace(candidate, peak_bytes=max(1, peak_bytes)))
        self.step.change(predicted_peak_bytes=peak_bytes, prediction=self.plan.predicted)
        return self.plan

    def _next(self, plan: Plan) -> Plan | None:
        """Put the step under a plan that is predicted to take less than the one that ran out of memory."""
        before = self._expected[self._arm]
        self.controller.ran_out(before)
        arm = self._chosen()
        return self._take(arm) if self._expected[arm].peak_bytes < before.peak_bytes else None

    def _chosen(self) -> int:
        """Return the plan to take; the leanest where none is predicted to fit."""
        if (arm := self.controller.choose(self._bucket, self._expected)) is not None:
            return arm
        return min(range(len(self.candidates)), key=lambda arm: self._expected[arm].peak_bytes)


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of a batch's tensors, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(batch))


def varying(one: Shapes, other: Shapes) -> Iterator[tuple[int, int]]:
    """Yield the dimensions in which shapes differ: the tensor's position, and the dimension's."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        yield from ((i, d) for d in range(len(a)) if a[d] != b[d])

"""The measured truth of a step: its peak, its gradients, and its time beside others'.

On an accelerator peaks are what its allocator counted, and clocks wait for it; gradients are compared on the CPU, so
that little else than the step is on the device.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.frontier.methods import Apply
from memfit.capture import measure_peak_bytes, measure_peaks
from memfit.hardware import synchronize
from memfit.pipeline import device_kind, device_named
from memfit.planner import CACHING
from memfit.training import Step
from memfit.workload import Workload

FIRST_ROUNDS = 3
LEAST_ROUNDS, MOST_ROUNDS = 6, 16
ROUNDINGS = 3
"""How often parameters are rounded to see what that does."""
MARGIN = 5.0
"""How much more than a rounding of the parameters another order of sums may do: up to 3.5 was measured (ViT)."""

Times = list[float | None]
"""Seconds of a step in each round; None in rounds that it did not take part in."""


@dataclass(frozen=True)
class Peak:
    """What a step takes at most.

    Attributes:
        allocated_bytes: Peak allocated.
        reserved_bytes: What the allocator took from the device; None where budgets are not held against that.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        """What is held against a budget."""
        return self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes


def peak_of(apply: Apply, workload: Workload, warm: bool = False) -> Peak:
    """Return the peak of a step that is not the first, parameters and optimizer state included.

    Args:
        warm: The optimizer has its state, and what compiles has compiled.
    """
    with apply(workload) as step:
        if not warm:
            step(workload.batch)
        found = measure_peaks(step, workload.batch)
        if found is None:
            return Peak(measure_peak_bytes(step, workload.batch))
    reserves = device_kind(workload.model) in CACHING
    return Peak(found.allocated_bytes, found.reserved_bytes if reserves else None)


@dataclass
class Gradients:
    """The gradients of a workload's parameters as they were when this was made, under one random state.

    Args:
        workload: Measured on, and set back each time.
    """

    workload: Workload

    def __post_init__(self) -> None:
        self.names = {id(p): name for name, p in self.workload.model.named_parameters()}
        self.values = {name: p.detach().cpu().clone() for name, p in self.workload.model.named_parameters()}

    def of(
        self, apply: Apply, values: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss, and the gradients by the parameters' own names, whatever a method calls them.

        Args:
            values: Of the parameters; None for what they were.
        """
        with torch.no_grad():
            for name, parameter in self.workload.model.named_parameters():
                parameter.copy_((self.values if values is None else values)[name])
        torch.manual_seed(0)
        with apply(self.workload) as step:
            now = {name: self.names[id(p)] for name, p in step.workload.model.named_parameters()}
            loss, found = step.gradients(self.workload.batch)
        return loss, {now[name]: gradient.cpu() for name, gradient in found.items()}


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, bool]:
    """Return how far gradients are off, relative to the largest of their parameter, and whether bitwise equal."""
    if found.keys() != expected.keys():
        return float("inf"), False
    off = [float((found[n] - g).abs().max() / g.abs().max().clamp_min(1e-30)) for n, g in expected.items()]
    return max(off), all(torch.equal(found[n], g) for n, g in expected.items())


def rounding_of(gradients: Gradients, apply: Apply, expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return how far each gradient moves, at most, when every parameter is one rounding up or down.

    A gradient that is zero but for rounding moves by as much as it is.
    """
    generator, moved = torch.Generator().manual_seed(0), dict.fromkeys(expected, 0.0)
    for _ in range(ROUNDINGS):
        _, found = gradients.of(apply, {n: _rounded(value, generator) for n, value in gradients.values.items()})
        moved = {n: max(moved[n], float((found[n] - g).abs().max())) for n, g in expected.items()}
    return moved


def _rounded(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    up = torch.rand(value.shape, generator=generator) < 0.5
    return torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))


def beyond_rounding(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rounding: Mapping[str, float]
) -> float:
    """Return how far gradients are off beyond what rounding does, relative to the largest of their parameter."""
    if found.keys() != expected.keys():
        return float("inf")
    beyond = {n: ((found[n] - g).abs().max() - MARGIN * rounding[n]).clamp_min(0) for n, g in expected.items()}
    relative = [(beyond[n] / g.abs().max().clamp_min(1e-30)).double() for n, g in expected.items()]
    return float(torch.stack(relative).max())  # NaN where any is, unlike Python's


def interleaved(
    steps: Mapping[str, tuple[Apply, Workload]],
    seconds: float,
    contenders: Callable[[Mapping[str, Times]], set[str]],
) -> dict[str, Times]:
    """Return the times of steps that are run in turns, in another order each round.

    Args:
        steps: How to run each, and on what, by its name.
        seconds: To be spent after the first rounds, in which all take part; some rounds are run in any case.
        contenders: Given the times of the first rounds, which go on.
    """
    order = random.Random(0)
    times: dict[str, Times] = {name: [] for name in steps}
    taking_part, started = set(steps), time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number == FIRST_ROUNDS:
            taking_part, started = contenders(times), time.perf_counter()
        if number >= LEAST_ROUNDS and time.perf_counter() - started > seconds:
            break
        for name in order.sample(sorted(steps), len(steps)):
            times[name].append(step_seconds(*steps[name]) if name in taking_part else None)
    return times


def step_seconds(apply: Apply, workload: Workload) -> float:
    """Return the time of one step, without garbage collection in it.

    On the CPU with one thread it is the process's time, which other programs on the machine add little to.
    """
    with apply(workload) as step:
        return _timed(step, workload)


def _timed(step: Step, workload: Workload) -> float:
    place = torch.device(device_named(None, workload))
    alone = place.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    gc.collect()
    gc.disable()
    try:
        synchronize(place)
        started = clock()
        step(workload.batch)
        synchronize(place)
        return clock() - started
    finally:
        gc.enable()


def ratios(times: Times, others: Times) -> list[float]:
    """Return how much longer a step took than another one, in each round that both took part in."""
    return [a / b for a, b in zip(times, others, strict=True) if a is not None and b is not None]


def median_ratio(times: Times, others: Times) -> float:
    """Return the median of the ratios."""
    return statistics.median(ratios(times, others))


def least_ratio(times: Times, others: Times) -> float:
    """Return the ratio of the least times: what else runs on the machine only ever adds to them."""
    return min(t for t in times if t is not None) / min(t for t in others if t is not None)


def spread(values: list[float]) -> float:
    """Return the standard error of a median of values, from their median absolute deviation.

    A normal distribution is assumed: the deviation is 1.4826 median absolute deviations, and the median's standard
    error 1.2533 deviations over √n.
    """
    centre = statistics.median(values)
    deviation = 1.4826 * statistics.median([abs(v - centre) for v in values])
    return float(1.2533 * deviation / len(values) ** 0.5)

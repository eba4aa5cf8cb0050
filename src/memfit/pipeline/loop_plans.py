"""The plans of a loop: made, kept from an earlier start of its program, or given; and changes the loop may make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

from msgspec.structs import replace
from torch import nn

from memfit.cost.cpu_costs import hurried
from memfit.errors import InfeasibleError, MemfitError, PlanMismatchError
from memfit.hardware.host import find_device
from memfit.ir.plan import Levers, Plan, Prediction
from memfit.ir.simulate import simulate
from memfit.levers.stack import check_plan
from memfit.pipeline._estimate import estimate
from memfit.pipeline._plan import planned as make_plan
from memfit.pipeline.kept_plans import Kept
from memfit.pipeline.loop_steps import AND, generators_kept
from memfit.pipeline.placement import device_kind
from memfit.planner.captured_steps import Findings
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import costs_of, predict
from memfit.planner.verb_options import PlanOptions
from memfit.tape import LoopWorkload, outside_autocast
from memfit.units import Progress, format_bytes, format_seconds
from memfit.workload import fingerprint

Mixed = Prediction | Literal["in use"] | None
"""What mixed precision is predicted to take: nothing, where the loop has it, or where that can't be run."""

Stages = Callable[[], contextlib.AbstractContextManager[Progress]]

_POINTS = 4
_FIRST_SECONDS = 0.5  # for solving for the first step


class LoopPlans:
    """Makes the plans of a loop.

    Args:
        options: Options of `memfit.plan`, `budget` at least.
        given: A plan to begin with; None to make one.
        stages: Entered for each plan that is made; gives what is called with (stage, done, total) meanwhile.

    Attributes:
        kept: What an earlier start of the program has kept.
    """

    def __init__(self, options: dict[str, Any], given: Plan | None, stages: Stages) -> None:
        self.kept = Kept()
        self._options, self._given, self._stages = options, given, stages
        self._findings: tuple[nn.Module | None, Findings] = None, Findings()

    def for_module(self, workload: LoopWorkload, *, is_alone: bool) -> Plan:
        """Return a plan for a module by itself, which only its first step runs under.

        Args:
            is_alone: Whether nothing else is trained.
        """
        given = self._given
        device = device_kind(workload.model)
        if given is not None and (given.fingerprint, given.device) == (fingerprint(workload), device):
            return given
        try:
            # Where others are trained too, they need a part of the budget, and nobody knows which.
            return self.made(workload, self._options["budget"] if is_alone else "1B", is_first=True)
        except InfeasibleError as e:
            return self.made(workload, f"{e.lowest_peak_bytes}B", is_first=True)

    def for_steps(self, workload: LoopWorkload, note: Callable[[str], None], *, is_later: bool) -> Plan:
        """Return a plan for steps that were seen: the one that was given, where it holds them.

        Args:
            note: Takes a text where it does not.
            is_later: Whether there was a plan for steps before.

        Raises:
            PlanMismatchError: The plan given was made for another model, optimizer or device.
        """
        given, budget = self._given, self._options["budget"]
        if given is None:
            return self.made(workload, budget)
        own, device = fingerprint(workload), device_kind(workload.model)
        # It may be for more modules than have trained so far, or have been in force for those before.
        is_part = is_later or set(workload.name.split(AND)) < set(given.workload.split(AND))
        if given.fingerprint != own and is_part:
            return self.made(workload, budget)
        if given.fingerprint != own or given.device != device:
            raise PlanMismatchError(
                f"plan= was made for {given.workload} on {given.device}, with the fingerprint {given.fingerprint}. The"
                f" loop trains {workload.name} on {device}, with {own}: another model, optimizer or"
                " device. Leave out plan= and give budget= to make a plan for this loop"
            )
        check_plan(given, workload)
        predicted = predicted_under(given, workload)
        if predicted.peak_upper_bytes <= given.budget_bytes:
            return replace(given, predicted=predicted)
        note(
            f"memfit: under the given plan the step needs {format_bytes(predicted.peak_upper_bytes)} of"
            f" {format_bytes(given.budget_bytes)}: memfit plans it again"
        )
        return self.made(workload, budget)

    def again(self, workload: LoopWorkload, plan: Plan) -> tuple[Plan, Prediction]:
        """Return a plan that holds larger steps, and what it predicts: the one in force, or another of its budget.

        Raises:
            InfeasibleError: None does.
        """
        with generators_kept(workload.tape):
            predicted = predicted_under(plan, workload)
            if predicted.peak_upper_bytes <= plan.budget_bytes:
                return plan, predicted
            made = self.made(workload, f"{plan.budget_bytes}B")
        return made, made.predicted

    def made(self, workload: LoopWorkload, budget: int | float | str, *, is_first: bool = False) -> Plan:
        """Return a plan for steps, or, in a hurry, for the first one, which is the only one that runs under it."""
        options = {"device": device_kind(workload.model)} | self._options | {"budget": budget}
        if is_first:
            asked = options.get("time_limit_seconds", _FIRST_SECONDS)
            options["time_limit_seconds"] = min(_FIRST_SECONDS, asked)

        def make() -> Plan:
            asked = PlanOptions(
                **options,
                precisions=("32-true",),
                optimizers=(),
                world_size=1,
                points=1 if is_first else _POINTS,
                measure=False,  # the loop's steps are its own
            )
            with self._stages() as progress:
                return make_plan(workload, asked, progress=progress, findings=self._findings_of(workload.model))

        with outside_autocast(), hurried():  # autocast is where the module is called; the step enters its own
            return self.kept.of(Plan, "plan", workload, options, make)

    def _findings_of(self, model: nn.Module) -> Findings:
        """Return what the plans so far have found out about a model."""
        if self._findings[0] is not model:
            self._findings = model, Findings()
        return self._findings[1]

    def first_peak_bytes(self, first: Plan, workload: LoopWorkload) -> int:
        """Predict the peak of a first step, which ran under a plan for its module by itself."""
        plain = self._findings_of(workload.model).plain

        def make() -> int:
            regions = first.levers.regions
            if plain is None or first.levers != Levers(microbatch_size=1, regions=regions):
                return predicted_under(first, workload).peak_bytes
            costs = costs_of([plain], find_device(first.device))
            return simulate(plain, costs, regions).peak_bytes

        with hurried():
            return self.kept.of(int, "first", workload, first.levers, make)

    def mixed(self, workload: LoopWorkload) -> Mixed:
        """Predict a step with autocast around its forward passes, and no levers."""
        if any(entry.context.autocast for entry in workload.tape.entries):
            return "in use"

        def make() -> Prediction:
            return estimate(workload, device=device_kind(workload.model), precision="bf16-mixed")

        try:
            with generators_kept(workload.tape), outside_autocast(), hurried():
                return self.kept.of(Prediction, "mixed", workload, None, make)
        except MemfitError:  # autocast refuses some losses
            return None


def predicted_under(plan: Plan, workload: LoopWorkload) -> Prediction:
    """Predict steps of a loop under a plan that was made for others."""
    device = find_device(plan.device)
    with outside_autocast(), hurried():
        trace = capture_levers(workload, plan.levers, device)
        return predict(trace, costs_of([trace], device), device)[0]


def is_slow(plan: Plan) -> bool:
    """Tell whether a plan makes a step so much slower that the loop itself could do better."""
    return plan.predicted.step_seconds > 1.1 * plan.plain.step_seconds


def advice(plan: Plan, mixed: Mixed) -> list[str]:
    """Return what the loop itself could do for a faster step or a lower peak, with the lines that do it."""
    lines = ["", "Changes to your loop that would make it faster or smaller:"]
    if (
        isinstance(mixed, Prediction)
        and mixed.peak_bytes < plan.plain.peak_bytes
        and mixed.step_seconds < plan.predicted.step_seconds
    ):
        peak, seconds = format_bytes(mixed.peak_bytes), format_seconds(mixed.step_seconds)
        change = mixed.step_seconds / plan.plain.step_seconds - 1
        than_plain = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than plain"
        lines += [
            "  mixed precision:  with torch.autocast(device.type, dtype=torch.bfloat16):",
            "                        loss = ...  # the forward pass, and not the backward pass",
            f"                    predicted, with that alone: {peak}, {seconds}, {than_plain}",
        ]
    return [
        *lines,
        "  microbatches:     for part in batch.split(size // 2):",
        "                        (loss_of(part) / 2).backward()  # then one optimizer.step()",
        "                    not predicted: memfit cannot tell which dimension is the batch",
        "memfit.plan predicts and applies both, for a step written as a memfit.Workload.",
    ]

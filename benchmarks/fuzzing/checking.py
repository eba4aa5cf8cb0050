"""Whether memfit is right on a random program: its predictions held against the allocator, its plans against a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace

from benchmarks.fuzzing.modules import workload_of
from benchmarks.fuzzing.programs import Program
from memfit.capture import real_copy, without_collector
from memfit.cost import calibration, with_workspaces
from memfit.errors import InfeasibleError, MemfitError
from memfit.hardware import allocated, find_device, host_name
from memfit.ir import CostTable, Levers, OpCost, Plan, Regions, Trace, Work, simulate
from memfit.levers import applied
from memfit.pipeline import plan
from memfit.planner import StepVariant, capture_levers, captured_steps, captured_through, predict
from memfit.solver import Solver, build, options
from memfit.workload import Workload, batch_size_of

STEPS = 2
_PLANNING_SECONDS = 0.3
_NUMBER_BYTES = 8
_BYTES_PER_SECOND, _FLOPS_PER_SECOND, _CALL_SECONDS = 1e10, 1e11, 1e-6
Running = Callable[[Workload], contextlib.AbstractContextManager[Callable[[Any], float]]]
"""Makes a step of a workload: called with a batch, it returns the loss."""


@dataclass
class Checked:
    """What was found of a program.

    Attributes:
        wrong: Every way in which memfit was wrong; empty where it was right.
        predicted_bytes: Peak of the plain step.
        measured_bytes: The same, over a run of two steps.
        budget_bytes: That a plan was made for; None where there is none to make.
        planned_bytes: Predicted peak of the planned step.
        planned_measured_bytes: The same, over a run of two steps.
        regions: How many the plan checkpoints.
    """

    wrong: list[str] = field(default_factory=list)
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    budget_bytes: int | None = None
    planned_bytes: int | None = None
    planned_measured_bytes: int | None = None
    regions: int = 0


@dataclass(frozen=True)
class _Outcome:
    """What a run left: its peak, the losses of its steps, and the bytes of what the model then holds."""

    peak_bytes: int
    losses: list[float]
    state: list[tuple[str, bytes]]

    def differences(self, other: _Outcome) -> str:
        """Return what is not bitwise equal, "" for nothing."""
        if self.losses != other.losses:
            return f"losses {self.losses} and {other.losses}"
        names = [name for (name, a), (_, b) in zip(self.state, other.state, strict=True) if a != b]
        return ", ".join(names)


def saved_number_bytes(trace: Trace) -> int:
    """Return a bound on what autograd saves of numbers that code multiplies or divides by: 8 bytes each.

    PyTorch makes a tensor of each such number, which no hook of saved tensors sees (`is_wrapped_number` in
    torch/csrc/autograd/saved_variable.cpp): it is the one thing that predictions leave out.
    """
    return _NUMBER_BYTES * sum(
        op.phase in ("forward", "recompute") and _takes_number(op.name, trace.signatures[op.signature])
        for op in trace.ops
    )


def _takes_number(name: str, signature: str) -> bool:
    return name.endswith(".Tensor") and any(isinstance(a, int | float) for a in json.loads(signature)["args"])


class Costs:
    """What operators cost: workspaces as measured, and times of a machine that does not exist, the same everywhere."""

    def __init__(self) -> None:
        self.table = CostTable(
            device=host_name(),
            torch_version=str(torch.__version__),
            threads=torch.get_num_threads(),
            ops={},
            dispatch_seconds=_CALL_SECONDS,
            checkpoint_seconds=_CALL_SECONDS,
            selective_op_seconds=_CALL_SECONDS,
            peak_error=calibration().peak_error,
        )

    def of(self, traces: Iterable[Trace], *_: object) -> CostTable:
        """Return the costs of the operators of some traces."""
        works = {text: work for trace in traces for text, work in zip(trace.signatures, trace.works, strict=True)}
        missing = [text for text in works if text not in self.table.ops]
        if missing:
            self.table = with_workspaces(self.table, traces)
            timed = {text: _timed(self.table.of(text), works[text]) for text in missing}
            self.table = replace(self.table, ops={**self.table.ops, **timed})
        return self.table


def _timed(cost: OpCost, work: Work) -> OpCost:
    nbytes = work.read_bytes + work.write_bytes
    return OpCost(nbytes / _BYTES_PER_SECOND + work.flops / _FLOPS_PER_SECOND, cost.workspace_bytes, True)


def checked(program: Program, costs: Costs) -> Checked | None:
    """Return what was found of a program; None where PyTorch itself refuses it, or its numbers are not finite."""
    with warnings.catch_warnings(), without_collector():
        warnings.simplefilter("ignore")
        try:
            workload = workload_of(program)
            reference = _ran(workload, _loop)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
            return None
        if not all(map(math.isfinite, reference.losses)):
            return None
        found = Checked()
        trace = _check_plain(workload, reference, costs, found)
        if trace is not None:
            _check_planned(workload, reference, _Planning(trace, costs, program.seed), found)
        return found


def _check_plain(workload: Workload, reference: _Outcome, costs: Costs, found: Checked) -> Trace | None:
    """Check the step as it is; return its trace, None where it can't be captured."""
    levers = Levers(microbatch_size=batch_size_of(workload.batch))
    device = find_device("cpu")
    try:
        trace = capture_levers(workload, levers, device)
        found.predicted_bytes = predict(trace, costs.of([trace]), device)[0].peak_bytes
    except MemfitError as e:
        found.wrong.append(f"the plain step is refused: {type(e).__name__}: {e}")
        return None
    outcome = _run(workload, _stepping(levers))
    found.measured_bytes = outcome.peak_bytes
    if not 0 <= outcome.peak_bytes - found.predicted_bytes <= saved_number_bytes(trace):
        found.wrong.append(f"the plain peak is {_off(found.predicted_bytes, outcome.peak_bytes)}")
    if different := reference.differences(outcome):
        found.wrong.append(f"the plain step differs from a plain loop: {different}")
    return trace


def _check_planned(workload: Workload, reference: _Outcome, ways: _Planning, found: Checked) -> None:
    try:
        found.budget_bytes = ways.budget_bytes()
        plan = ways.plan(workload, found.budget_bytes)
    except MemfitError as e:
        found.wrong.append(f"no plan: {type(e).__name__}: {e}")
        return
    found.planned_bytes, found.regions = plan.predicted.peak_bytes, len(plan.levers.regions)
    try:
        outcome = _run(workload, _stepping(plan.levers))
    except Exception as e:
        found.wrong.append(f"the planned step fails: {type(e).__name__}: {e}")
        return
    found.planned_measured_bytes = outcome.peak_bytes
    if not 0 <= outcome.peak_bytes - found.planned_bytes <= saved_number_bytes(ways.trace):
        found.wrong.append(f"the planned peak is {_off(found.planned_bytes, outcome.peak_bytes)}")
    if outcome.peak_bytes > plan.budget_bytes:
        found.wrong.append(f"the planned step takes {outcome.peak_bytes}, over its budget of {plan.budget_bytes}")
    if different := reference.differences(outcome):
        found.wrong.append(f"the planned step differs from a plain loop: {different}")


class _Planning:
    """Plans a step whose plain trace is known, for a budget between the leanest plan's peak and the plain one's."""

    def __init__(self, trace: Trace, costs: Costs, seed: int) -> None:
        self.trace, self.costs, self.random = trace, costs, Random(seed)
        self.optimizers = None if self.random.random() < 0.1 else ()

    def budget_bytes(self) -> int:
        """Return a budget that some plan fits."""
        table = self.costs.of([self.trace])
        regions = Regions(self.trace)
        problem = build(regions, table, options(regions, table), 0)
        lowest = Solver(problem).leanest(_PLANNING_SECONDS).peak_bytes
        plain = simulate(self.trace, table).peak_bytes
        chosen = lowest + self.random.uniform(0.0, 0.9) * max(0, plain - lowest)
        return int(chosen * (1 + table.peak_error)) + 64

    def plan(self, workload: Workload, budget_bytes: int) -> Plan:
        """Return a plan, or that for the budget that memfit names where there is none."""
        with (
            mock.patch.object(captured_steps, "costs_of", self.costs.of),
            captured_through(self._captured),
        ):
            try:
                return self._planned(workload, budget_bytes)
            except InfeasibleError as e:
                return self._planned(workload, e.lowest_peak_bytes)

    def _planned(self, workload: Workload, budget_bytes: int) -> Plan:
        return plan(
            workload,
            budget=budget_bytes,
            numerics="exact",
            precisions=("32-true",),
            optimizers=self.optimizers,
            points=1,
            time_limit_seconds=_PLANNING_SECONDS,
        )

    def _captured(self, variant: StepVariant, capture: Callable[[StepVariant], Trace]) -> Trace:
        """Return the trace of a step; the plain one is not captured again."""
        plain = variant.levers == Levers(microbatch_size=batch_size_of(variant.workload.batch))
        return self.trace if plain else capture(variant)


def _off(predicted: int, measured: int) -> str:
    return f"{predicted}, measured {measured} ({predicted / measured - 1:+.2%})"


def _stepping(levers: Levers) -> Running:
    @contextlib.contextmanager
    def stepping(workload: Workload) -> Iterator[Callable[[Any], float]]:
        with applied(levers, workload) as step:
            yield lambda batch: step(batch).loss

    return stepping


@contextlib.contextmanager
def _loop(workload: Workload) -> Iterator[Callable[[Any], float]]:
    """Yield a training step as people write it."""
    parameters = [p for group in workload.optimizer.param_groups for p in group["params"]]

    def step(batch: Any) -> float:
        workload.optimizer.zero_grad()
        loss: Any = workload.loss_fn(workload.model, batch)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        if not all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None):
            raise ValueError("a gradient is not finite")
        if workload.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, workload.max_grad_norm)
        workload.optimizer.step()
        return float(loss)

    yield step


def _run(workload: Workload, running: Running) -> _Outcome:
    """Run some steps on a copy of a workload; the peak is that of the whole run, the copy's making included."""
    with allocated() as meter:
        outcome = _ran(workload, running)
    return dataclasses.replace(outcome, peak_bytes=meter.peak_bytes)


def _ran(workload: Workload, running: Running) -> _Outcome:
    losses: list[float] = []
    copied = real_copy(workload)
    with running(copied) as step:
        for index in range(STEPS):
            torch.manual_seed(index)
            losses.append(step(copied.batch))
    return _Outcome(0, losses, [(name, _bytes_of(t)) for name, t in copied.model.state_dict().items()])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    contiguous = tensor.detach().contiguous()
    return contiguous.reshape(-1).view(torch.uint8).numpy().tobytes()

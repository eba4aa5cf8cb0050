"""Another budget for a workload that was planned before: a look-up on the frontier that its plan holds."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.errors import InfeasibleError
from memfit.hardware.host import find_device
from memfit.ir.plan import NUMERICS, Candidate, Plan, Prediction
from memfit.levers.stack import check_plan, check_workload
from memfit.levers.switch import at_point
from memfit.pipeline.verbs import verb
from memfit.planner import gpu_process
from memfit.planner.captures import capture_levers
from memfit.planner.prediction import Progress, costs_of, predict, silent
from memfit.planner.search import Confirmed, Limits, bytes_of_plain, with_plan
from memfit.report.notebook_progress import stages, with_bars
from memfit.units import format_bytes, read_budget
from memfit.workload import Workload, tokens_per_sample


@with_bars(stages)
@verb
def look_up(plan: Plan, workload: Workload, *, budget: int | float | str, progress: Progress = silent) -> Plan:
    """Return the plan for another budget: the fastest point of a plan's frontier that fits. Nothing is solved.

    The point is applied to a copy and captured, so that what is predicted is predicted for that step; one that does
    not fit gives way to the next. `plan` may find a faster one between two points.

    Args:
        plan: A plan for the workload, from `memfit.plan`.
        workload: The user's workload; nothing of it is changed.
        budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%") or of the plain
            step's peak ("0.5x").
        progress: Called with (stage, done, total); by default bars in a notebook, and nothing elsewhere.

    Raises:
        BudgetError: `budget` can't be parsed.
        PlanMismatchError: The plan was made for another workload.
        InfeasibleError: No point of the frontier that the plan's numerics allow fits.
    """
    return _looked_up(workload, plan=plan, budget=budget, progress=progress)


def _looked_up(workload: Workload, *, plan: Plan, budget: int | float | str, progress: Progress) -> Plan:
    device = find_device(plan.device)
    asked = read_budget(budget)
    plain_bytes = bytes_of_plain(asked, plan.plain)
    budget_bytes = asked.nbytes(device_bytes=device.usable_bytes, plain_bytes=plain_bytes)
    check_plan(plan, workload)
    if gpu_process.is_elsewhere(device):
        sizes = [point.levers.microbatch_size for point in plan.frontier]
        return gpu_process.call(_looked_up, workload, {"plan": plan, "budget": budget}, progress, sizes=sizes)
    check_workload(workload, device)
    allowed = NUMERICS[: NUMERICS.index(plan.allowed) + 1]
    points = sorted((c for c in plan.frontier if c.numerics in allowed), key=lambda c: c.step_seconds)
    lowest: Prediction | None = None
    captured: list[Candidate] = []
    for index, point in enumerate(c for c in points if c.peak_bytes <= budget_bytes):
        progress("capture", index, len(points))
        trace = capture_levers(workload, point.levers, device)
        predicted, _ = predict(trace, costs_of([trace], device), device, tokens_per_sample(workload.batch))
        if predicted.peak_upper_bytes <= budget_bytes:
            note = f"a point of the frontier of the plan for {format_bytes(plan.budget_bytes)}"
            share = asked.share_text(device.name, device.usable_bytes, plain_bytes)
            limits = Limits(budget_bytes, 0.0, plan.allowed)
            seen = [point.levers for point in captured]
            rows = [*captured, *(row for row in plan.frontier if row.levers not in seen)]
            found = replace(plan, frontier=with_plan(rows, Confirmed(point, predicted), limits))
            return replace(at_point(found, point, predicted, note), budget_bytes=budget_bytes, budget_share=share)
        captured.append(Confirmed(point, predicted).as_captured())
        lowest = predicted if lowest is None or predicted.peak_bytes < lowest.peak_bytes else lowest
    raise _infeasible(plan, points, budget_bytes, lowest)


def _infeasible(plan: Plan, points: list[Candidate], budget_bytes: int, lowest: Prediction | None) -> InfeasibleError:
    upper = plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes
    least = min((int(c.peak_bytes * upper) for c in points), default=plan.predicted.peak_upper_bytes)
    needed = least if lowest is None else lowest.peak_upper_bytes
    message = (
        f"no point of the plan's frontier fits budget={format_bytes(budget_bytes)} ({budget_bytes} bytes) with"
        f" numerics={plan.allowed!r}: the leanest needs about {format_bytes(needed)}. Raise budget=, or call"
        " memfit.plan for it, which may find a leaner one"
    )
    where = plan.predicted.where if lowest is None else lowest.where
    return InfeasibleError(message, budget_bytes=budget_bytes, lowest_peak_bytes=needed, where=where, proven=False)

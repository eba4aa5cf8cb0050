"""A plan: which levers, how far, for which workload, and what they are predicted to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from memfit.errors import InfeasibleError
from memfit.foundations import Budget, format_bytes, public, read_budget
from memfit.ir import codec
from memfit.ir.codec import Shown, ShownList
from memfit.ir.costs import Throughput
from memfit.ir.levers import Levers, LeverUse, Numerics, Sharding, allows, levers_key
from memfit.ir.timeline import PeakPart


class Prediction(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicted memory and time of a step.

    Attributes:
        peak_bytes: Peak allocated.
        peak_upper_bytes: Upper end of the prediction, with its error: on a GPU of the reserved memory, elsewhere of the
            peak. memfit compares it with the budget. On the CPU the measured peak is at most this in 98 % of steps like
            those of `benchmarks.zoo`, on which the error was calibrated (`memfit.cost.error_bars`).
        step_seconds: Seconds of one optimizer update at the global batch.
        by_category: Bytes at the peak, by category.
        where: The place of the peak: pass, module and operator.
        peak_reserved_bytes: Memory that PyTorch's allocator reserves on a GPU; None elsewhere.
        device_bytes: The device's memory for a step; None if not recorded.
        throughput: The throughput of the step; None if not recorded.
        notes: Assumptions of the prediction.
        after_step_bytes: Bytes still allocated after the step; None if not recorded.
        phase_seconds: Parts of `step_seconds`, by phase ("forward", "backward", "recompute", "optimizer").
        context_bytes: GPU memory of the process outside of the allocator: the driver's context, the libraries' handles
            and the launched kernels. None elsewhere.
        context_upper_bytes: The same with every kernel of the libraries, which drivers older than CUDA 12.2 may load
            (`memfit.cost.operator_call`). None elsewhere.
        retries: Number of times that the allocator releases its cache on a full GPU and tries again, in a first and a
            steady step; 0 if all reserved memory has room. None if the step runs out of memory, and on other devices.
        largest: The largest groups of tensors at the peak, the largest first. Empty if not recorded.
    """

    peak_bytes: int
    peak_upper_bytes: int
    step_seconds: float
    by_category: dict[str, int]
    where: str
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    throughput: Throughput | None = None
    notes: list[str] = []
    after_step_bytes: int | None = None
    phase_seconds: dict[str, float] = {}
    context_bytes: int | None = None
    context_upper_bytes: int | None = None
    retries: int | None = None
    largest: tuple[PeakPart, ...] = ()

    @property
    def process_bytes(self) -> int | None:
        """What `nvidia-smi` shows of the process at the peak: reserved, and what is outside of the allocator."""
        if self.peak_reserved_bytes is None or self.context_bytes is None:
            return None
        return self.peak_reserved_bytes + self.context_bytes

    @property
    def process_upper_bytes(self) -> int | None:
        """Upper end of `process_bytes`: of what is reserved, and with every kernel loaded."""
        return None if self.context_upper_bytes is None else self.peak_upper_bytes + self.context_upper_bytes


class Candidate(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A point of the frontier.

    Attributes:
        levers: The settings of the plan.
        uses: The used levers, in words.
        numerics: The freest class of its levers.
        budget_bytes: The budget that it was solved for.
        peak_bytes: Peak allocated: the prediction for the step captured with the levers if `is_captured`, else the
            value of the solver.
        step_seconds: Seconds of one optimizer update at the global batch, from the same source.
        status: "optimal" if the solver proved it for its precision and microbatch size, else "feasible".
        bound_seconds: No plan of this precision and microbatch size within `budget_bytes` is faster than this, in the
            solver's model.
        peak_upper_bytes: Upper end of the peak, as in `Prediction`; if not `is_captured`, with the error of captured
            steps of these levers. None if unknown.
        is_captured: Whether the step was captured with the levers applied.
    """

    levers: Levers
    numerics: Numerics
    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    status: Literal["optimal", "feasible"]
    bound_seconds: float
    peak_upper_bytes: int | None = None
    is_captured: bool = False
    uses: tuple[LeverUse, ...] = ()

    @property
    def held_bytes(self) -> int:
        """What is held against the budget."""
        return self.peak_bytes if self.peak_upper_bytes is None else self.peak_upper_bytes


class Solution(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The search for a plan.

    Attributes:
        status: "optimal" if no plan that fits is faster in the solver's model, or more than `gap` faster than the
            captured step of the plan; else "feasible".
        bound_seconds: A lower bound on the step time of every plan that fits, in the solver's model.
        gap: (step_seconds − bound) / step_seconds.
        solve_seconds: Seconds that the solver needed.
    """

    status: Literal["optimal", "feasible"]
    bound_seconds: float
    gap: float
    solve_seconds: float


class MeasuredStep(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that memfit ran for a few steps, on copies of the workload, before it chose one.

    Attributes:
        levers: The settings of the plan.
        uses: The used levers, in words.
        predicted_seconds: The predicted seconds of its step.
        measured_seconds: The median of its measured seconds.
        steps: Number of timed steps (> 0).
    """

    levers: Levers
    uses: tuple[LeverUse, ...] = ()
    predicted_seconds: float
    measured_seconds: float
    steps: int


class Proof(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The comparison of recomputed tensors with the user's own step, bit by bit.

    Attributes:
        levers: The key of the compared levers (`levers_key`), or of levers that recompute nothing; "" for none.
        why: The reason for no comparison; "" if there was one.
    """

    levers: str = ""
    why: str = ""


class Frontier(ShownList[Candidate]):
    """The frontier of a plan: a list, shown as the table and the picture that its plan has of it.

    Args:
        points: From the fastest to the leanest.
        plan: The plan, for the budget and the class that it allows.
    """

    def __init__(self, points: Iterable[Candidate], plan: Plan) -> None:
        super().__init__(points)
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # the plan makes it anew


class Plan(Shown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan, as in its file. You may edit the file by hand; `memfit verify` then checks it.

    Attributes:
        schema: Version of the file's format.
        memfit_version: Version of memfit that made the plan.
        torch_version: Version of PyTorch that made the plan.
        workload: Name of the workload.
        fingerprint: Hash of the recorded step. memfit refuses a plan for another step.
        device: Device that the plan was made for.
        batch_size: Samples of the global batch.
        budget_bytes: The budget of the plan.
        levers: The settings of the plan.
        numerics: The freest class of the used levers.
        uses: The used levers, in words, with their classes.
        allowed: The numerics class that the user allowed.
        plain: The prediction for the unchanged step.
        predicted: The prediction for this plan, from a capture of the step with the plan applied.
        solution: The search for the plan.
        frontier: Plans from the fastest to the leanest, to look up another budget.
        notes: Assumptions, exclusions and skipped steps, with reasons.
        host_budget_bytes: Limit of pinned host memory that levers may take.
        proof: The comparison of recomputed tensors with the step. Without one, the first step under the plan compares
            them.
        budget_share: The budget as a share ("50% of the 21.9 GiB that cpu has for a step"); "" for bytes.
        engine: How another library's engine has ranks share the step, on paper; `batch_size` and predictions are then
            of one rank. None without another library.
        measured: Plans of nearly equal predicted time that memfit ran here, the fastest first. Empty if none was run.
        code_seconds: Estimated seconds to compile the step on this CPU, once; 0 if nothing is compiled, or if unknown.
    """

    schema: str = "memfit.plan/1"
    memfit_version: str
    torch_version: str
    workload: str
    fingerprint: str
    device: str
    batch_size: int
    budget_bytes: int
    levers: Levers
    numerics: Numerics
    uses: tuple[LeverUse, ...]
    allowed: Numerics
    plain: Prediction
    predicted: Prediction
    solution: Solution
    frontier: list[Candidate] = []
    notes: list[str] = []
    host_budget_bytes: int = 0
    proof: Proof = Proof()
    budget_share: str = ""
    engine: Sharding | None = None
    measured: tuple[MeasuredStep, ...] = ()
    code_seconds: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "frontier", Frontier(self.frontier, self))

    @classmethod
    @public
    def load(cls, path: str | Path) -> Plan:
        """Return the plan that a file holds.

        Raises:
            PlanError: It can't be read, or is not a plan.
        """
        return codec.read(path, cls)

    @public
    def save(self, path: str | Path) -> Path:
        """Write the plan to a file, whole or not at all, and return its path.

        Raises:
            OutputError: The file can't be written.
        """
        return codec.write_atomic(path, codec.encode(self))

    @public
    def at(self, budget: int | float | str) -> Plan:
        """Return the plan for another budget: the fastest point of the frontier that fits. Nothing is solved.

        `memfit.plan` may find a faster one between two points. What is predicted for a point that was not captured is
        the solver's prediction; `memfit.verify` measures it.

        Args:
            budget: Bytes, a string with a unit ("1.5GiB"), or a share of the device's memory ("90%") or of the plain
                step's peak ("0.5x").

        Raises:
            BudgetError: `budget` can't be read.
            InfeasibleError: No point of the frontier fits whose numerics class the plan allows.
        """
        asked = read_budget(budget)
        plain_bytes = bytes_of_plain(asked, self.plain)
        budget_bytes = asked.nbytes(device_bytes=self.plain.device_bytes, plain_bytes=plain_bytes)
        allowed = [point for point in self.frontier if allows(self.allowed, point.numerics)]
        fitting = [point for point in allowed if _upper_bytes(self, point) <= budget_bytes]
        if not fitting:
            least = min((_upper_bytes(self, point) for point in allowed), default=self.predicted.peak_upper_bytes)
            raise InfeasibleError(
                f"Does not fit: needs {format_bytes(least)} of {format_bytes(budget_bytes)}.\nNo point of the"
                f" plan's frontier with numerics={self.allowed!r} needs less. Raise budget=, or call"
                " memfit.plan with it to search for a leaner plan",
                budget_bytes=budget_bytes,
                lowest_peak_bytes=least,
                where=self.predicted.where,
                proven=False,
            )
        point = min(fitting, key=lambda one: one.step_seconds)
        note = f"a point of the frontier of the plan for {format_bytes(self.budget_bytes)}"
        found = at_point(self, point, note if point.is_captured else f"{note}, as predicted by the solver")
        predicted = self.predicted if point.levers == self.levers else found.predicted
        share = asked.share_text(self.device, self.plain.device_bytes, plain_bytes)
        return msgspec.structs.replace(found, predicted=predicted, budget_bytes=budget_bytes, budget_share=share)

    @property
    def classes(self) -> dict[str, Numerics]:
        """The numerics class of each used lever, by its name."""
        return {use.name: use.numerics for use in self.uses}

    @property
    def measured_seconds(self) -> float | None:
        """The measured seconds of the plan's step; None if the plan was chosen without running it."""
        return next((step.measured_seconds for step in self.measured if step.levers == self.levers), None)

    @property
    def is_proven(self) -> bool:
        """True if all recomputed tensors matched a real step; False too for levers that were changed since."""
        return self.proof.levers == levers_key(self.levers)


def bytes_of_plain(budget: Budget, plain: Prediction) -> int:
    """Return what a share of the plain step's peak is a share of.

    From "1x" on that is the upper end of its peak, which is what is held against budgets: "1x" is what it runs in.
    """
    return plain.peak_upper_bytes if budget.amount >= 1 else plain.peak_reserved_bytes or plain.peak_bytes


def at_point(plan: Plan, candidate: Candidate, note: str) -> Plan:
    """Return the plan that runs a point of a plan's frontier. What it predicts is what the point has."""
    predicted = msgspec.structs.replace(
        plan.predicted,
        peak_bytes=candidate.peak_bytes,
        peak_upper_bytes=_upper_bytes(plan, candidate),
        peak_reserved_bytes=None,
        step_seconds=candidate.step_seconds,
        by_category={},
        where="",
        throughput=None,
        phase_seconds={},
        after_step_bytes=None,
    )
    bound = min(predicted.step_seconds, *(c.bound_seconds for c in plan.frontier))
    solution = Solution(
        status="feasible",
        bound_seconds=bound,
        gap=1 - bound / predicted.step_seconds,
        solve_seconds=plan.solution.solve_seconds,
    )
    return msgspec.structs.replace(
        plan,
        levers=candidate.levers,
        numerics=candidate.numerics,
        uses=candidate.uses,
        predicted=predicted,
        solution=solution,
        notes=[*plan.notes, note],
    )


def _upper_bytes(plan: Plan, candidate: Candidate) -> int:
    upper = plan.predicted.peak_upper_bytes / plan.predicted.peak_bytes
    return candidate.peak_upper_bytes or int(candidate.peak_bytes * upper)

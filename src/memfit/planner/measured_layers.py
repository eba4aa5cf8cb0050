"""Plans from measured layers: for frameworks whose steps memfit doesn't capture, but applies plans to and measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from memfit.errors import InfeasibleError
from memfit.foundations import Progress, __version__, read_budget, silent
from memfit.ir import Candidate, Levers, LeverUse, Numerics, Plan, Prediction, Solution
from memfit.levers import LeversOn, lever_uses
from memfit.report import infeasible_verdict


@dataclass
class MeasuredPlanner(ABC):
    """A workload with its layers measured.

    Attributes:
        allowed: The freest numerics class of its plans.
        framework: Its name and version.
        device_bytes: The device's memory, where budgets may be a share of it.
        couples_batch: Whether a sample's result depends on the others of its microbatch.
        reorders: Whether recomputed layers may round differently.
        solve_seconds: Seconds until `tried` and `solved` had what they return.
    """

    workload: Any
    points: int = 10
    time_limit_seconds: float = 6.0
    progress: Progress = silent
    allowed: Numerics = "reordered"
    framework: str = field(init=False)
    fingerprint: str = field(init=False)
    device: str = field(init=False)
    batch_size: int = field(init=False)
    device_bytes: int | None = field(init=False, default=None)
    couples_batch: bool = field(init=False, default=False)
    reorders: bool = field(init=False, default=True)
    solve_seconds: float = field(init=False)

    @abstractmethod
    def plain_bytes(self) -> int | None:
        """Return the plain step's peak, if it is known."""

    @abstractmethod
    def tried(self, budget_bytes: int) -> Iterator[tuple[Candidate, Prediction, list[str]]]:
        """Yield proposals of the solver with what was measured of them and notes, while none of them fits.

        Raises:
            InfeasibleError: There are no more.
        """

    @abstractmethod
    def solved(self) -> tuple[Prediction, list[Candidate]]:
        """Return what the plain step takes, and the frontier."""

    def uses(self, levers: Levers) -> tuple[LeverUse, ...]:
        """Return the levers that are used, in words."""
        uses = lever_uses(LeversOn(levers, self.batch_size, self.couples_batch))
        return tuple(replace(u, numerics="reordered") if self.reorders and u.recomputes else u for u in uses)

    def plan(self, budget: int | float | str) -> Plan:
        """Return the first plan tried whose applied step is measured to fit.

        Raises:
            InfeasibleError: None does.
        """
        asked = read_budget(budget, of_device=self.device_bytes is not None)
        plain_bytes = self.plain_bytes() if asked.of == "plain" else None
        budget_bytes = asked.nbytes(device_bytes=self.device_bytes, plain_bytes=plain_bytes)
        tried = self.tried(budget_bytes)
        chosen, predicted, notes = next(t for t in tried if t[1].peak_upper_bytes <= budget_bytes)
        plain, points = self.solved()
        bound = min(chosen.bound_seconds, chosen.step_seconds)
        return Plan(
            memfit_version=__version__,
            torch_version=self.framework,
            workload=self.workload.name,
            fingerprint=self.fingerprint,
            device=self.device,
            batch_size=self.batch_size,
            budget_bytes=budget_bytes,
            budget_share=asked.share_text("the machine", self.device_bytes, plain_bytes or 0),
            levers=chosen.levers,
            uses=chosen.uses,
            numerics=chosen.numerics,
            allowed=self.allowed,
            plain=plain,
            predicted=predicted,
            solution=Solution(
                status=chosen.status,
                bound_seconds=bound,
                gap=max(0.0, 1 - bound / chosen.step_seconds),
                solve_seconds=self.solve_seconds,
            ),
            frontier=points,
            notes=notes,
        )

    @staticmethod
    def prediction(
        peak_bytes: int, upper_bytes: int, seconds: float, where: str = "measured on the applied step"
    ) -> Prediction:
        """Return what a step takes, as far as layers and whole steps tell."""
        return Prediction(
            peak_bytes=peak_bytes, peak_upper_bytes=upper_bytes, step_seconds=seconds, by_category={}, where=where
        )

    @staticmethod
    def conflicts(spans: Sequence[tuple[int, int]], count: int) -> list[frozenset[int]]:
        """Return the regions around each of some layers, of which at most one can be chosen.

        Args:
            spans: The first layer of each region, and one past its last.
        """
        around = (frozenset(j for j, (a, b) in enumerate(spans) if a <= layer < b) for layer in range(count))
        return list(dict.fromkeys(members for members in around if len(members) > 1))

    @staticmethod
    def infeasible(budget_bytes: int, lowest_bytes: int, advice: str) -> InfeasibleError:
        """Return that no plan fits, the lowest peak measured, and what to do."""
        return InfeasibleError(
            f"{infeasible_verdict(budget_bytes, lowest_bytes)}\n{advice}",
            budget_bytes=budget_bytes,
            lowest_peak_bytes=lowest_bytes,
            where="the applied step, measured",
        )
